"""A storage that fails or lies while a checkpoint is read: an error or the right bytes, never others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.adapters.comm import current_ranks
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import HoldfastError
from holdfast.core.names import step_folder
from holdfast.engine.load import load_checkpoint
from holdfast.engine.options import LoadOptions
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage
from holdfast.testing.faults import Fault, FaultGate, faulty
from tests.faults.row import SURVIVED, WRONG, Row, Tally
from tests.faults.rows_storage import HOW_LONG
from tests.faults.world import DEADLINE_S, same, save, state, told, world

BITS = 40  # of every read and write


def load(storage: Storage) -> dict[str, Any] | None:
    """Step 1 as it is loaded, every byte verified; None if that raises."""
    fresh = state(0)
    try:
        ranks = current_ranks(DEADLINE_S)
        load_checkpoint(ranks, lambda: Checkpoint(storage, step_folder(1)), fresh, LoadOptions(), deadline_s=DEADLINE_S)
    except HoldfastError:
        return None
    return fresh


def verify(storage: Storage) -> bool:
    try:
        return Checkpoint(storage, step_folder(1)).verify().good
    except HoldfastError:
        return False


def read_with(fault: Fault, root: Path, what: str) -> Tally | None:
    """Load and verify with a fault at one call of each: what loads is right, and without the fault all is well."""
    loading, verifying = (faulty(LocalStorage(root), fault, quiet=True) for _ in range(2))
    found, good = load(loading), verify(verifying)
    if not _injected(loading) and not _injected(verifying):
        return None
    if found is not None and not same(found, state(1)):
        return told(WRONG, what, "other bytes were loaded without an error")
    if good and _injected(verifying) and not fault.call and fault.do == "corrupt":
        return told(WRONG, what, "verify did not see it")
    again = load(LocalStorage(root))
    return SURVIVED if again is not None and same(again, state(1)) else told(WRONG, what, "it is damaged now")


def _injected(storage: Any) -> bool:
    gate = storage.gate
    assert isinstance(gate, FaultGate)
    return bool(gate.done)


def every_read(make: Callable[[int], Fault], seed: int) -> Tally:
    total = Tally()
    with world() as here, here.root() as root:
        for number in range(1, 10_000):
            fault = make(number)
            tally = read_with(fault, root, f"{fault} while step 1 is read")
            if tally is None:
                return total
            total += tally
    return total


def flipped_reads(seed: int) -> Tally:
    """A few bits of what every read gives."""
    total = Tally()
    for offset in range(BITS):
        total += every_read(partial(_flip, seed + offset), seed)
    return total


def _flip(seed: int, number: int) -> Fault:
    return Fault("corrupt", number, seed=seed)


def flipped_writes(seed: int) -> Tally:
    """A disk that lies at one write: the new step may be damaged, but it says so, and the older one is good."""
    total = Tally()
    with world() as here:
        for number in range(1, 10_000):
            for bit in range(BITS):
                fault = Fault("corrupt", number, "write|put", seed=seed + bit)
                with here.root() as root:
                    storage = faulty(LocalStorage(root), fault, quiet=True)
                    try:
                        save(storage, 2, 2)
                    except HoldfastError:
                        pass  # seen at once: the manifest is read back
                    if not _injected(storage):
                        return total
                    total += _seen(root, str(fault))
    return total


def _seen(root: Path, what: str) -> Tally:
    older = load(LocalStorage(root))
    if older is None or not same(older, state(1)):
        return told(WRONG, what, "step 1 was damaged")
    storage = LocalStorage(root)
    try:
        good = Checkpoint(storage, step_folder(2)).verify().good
    except HoldfastError:
        good = False
    if not good:
        return SURVIVED
    return told(WRONG, what, "verify did not see the flipped bit of step 2")


ROWS = (
    *(
        Row(f"EIO at storage call k of a load, {when}", partial(every_read, partial(Fault, "eio", lasting=lasting)))
        for when, lasting in HOW_LONG.items()
    ),
    Row("short read at storage call k", partial(every_read, partial(Fault, "short"))),
    Row("bit flipped in what is read", flipped_reads, counted=False),
    Row("bit flipped in what is written", flipped_writes, counted=False),
)
