"""A storage that fails in the background writer: training goes on, and says what was not saved."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import holdfast
from holdfast.checkpoint.run_identity import run_id
from holdfast.core.errors import HoldfastError
from holdfast.storage.local import LocalStorage
from holdfast.testing.faults import Fault, writer_faults
from holdfast.writer.startup_cleanup import clean_arenas
from tests.faults.row import HUNG, WRONG, Row, Tally
from tests.faults.world import BLOCK_BYTES, DEADLINE_S, JOBS, Hung, World, in_children, judge, state, told, world

AT_ONCE = 4
PATIENCE_S, TRAINER_S, HANG_S = 1.5, 20.0, 600.0
NEW_STEP = JOBS[0]
KINDS = ("entries", "begin", "create", "hold", "note", "writer", "write", "sync", "put", "publish")
WRITES = "write|put|create|sync"


def train(root: Path, fault: Fault, wait_s: float) -> None:
    """A trainer whose writer has the fault: it saves step 2, and hears in time whether that went well."""
    _be_quiet()
    with writer_faults(fault):
        _save_with(root, fault, wait_s)


def _save_with(root: Path, fault: Fault, wait_s: float) -> None:
    checkpointer = holdfast.Checkpointer(LocalStorage(root), block_bytes=BLOCK_BYTES, deadline_s=DEADLINE_S / 2)
    handle = checkpointer.save(2, state(2))
    try:
        handle.result(wait_s)
    except HoldfastError:
        if fault.do == "enospc" and not fault.lasting:
            _save_again(checkpointer, wait_s)
        raise
    finally:
        checkpointer.close(min(wait_s, 1.0) if fault.do == "hang" else wait_s)
        if fault.do == "hang" and checkpointer._engine.background is not None:
            checkpointer._engine.background.writer.kill()  # it would wait for a storage that never answers


def _save_again(checkpointer: holdfast.Checkpointer, wait_s: float) -> None:
    """There is room again: the next save of the same run must work."""
    try:
        checkpointer.save(3, state(3)).result(wait_s)
    except HoldfastError as error:
        raise AssertionError("the next save failed too") from error


def _be_quiet() -> None:
    """What the fault brings about is expected: the log is not for people."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")


def wave(here: World, faults: Sequence[Fault], wait_s: float) -> list[Tally | None]:
    """Several trainers at once, each with a root and a fault of its own; None where there was no such call."""
    roots = [here.copy() for _ in faults]
    works = [partial(train, root, fault, wait_s) for root, fault in zip(roots, faults, strict=True)]
    try:
        ends = in_children(works, TRAINER_S + wait_s)
    except Hung:
        return [told(HUNG, f"{fault} in the writer", "the trainer did not end") for fault in faults]
    out: list[Tally | None] = []
    for root, fault, (acknowledged, code) in zip(roots, faults, ends, strict=True):
        what = f"writer_faults('{fault}')"
        clean_arenas(run_id(LocalStorage(root)))  # the test is the only one who would come back for them
        if code:
            out.append(told(WRONG, what, f"the trainer ended with {code}"))
        else:
            tally = judge(root, NEW_STEP.after if acknowledged else NEW_STEP.meanwhile, what)
            out.append(None if acknowledged and tally.good else tally)
    return out


def every_call(make: Callable[[int], Fault], seed: int, most: int = 1000) -> Tally:
    """The fault at call 1, 2, ... of the writer, until a whole wave of saves went well."""
    total = Tally()
    with world() as here:
        for first in range(1, most, AT_ONCE):
            tallies = wave(here, [make(first + offset) for offset in range(AT_ONCE)], DEADLINE_S / 2)
            total = sum((tally for tally in tallies if tally is not None), total)
            if all(tally is None for tally in tallies):
                break
    return total


def hanging(seed: int) -> Tally:
    """A storage that does not answer: the trainer hears of it when its patience ends, not later."""
    faults = [Fault("hang", 1, kind, hang_s=HANG_S) for kind in KINDS]
    total = Tally()
    with world() as here:
        for first in range(0, len(faults), AT_ONCE):
            tallies = wave(here, faults[first : first + AT_ONCE], PATIENCE_S)
            total = sum((tally for tally in tallies if tally is not None), total)
    return total


def _full(lasting: bool, number: int) -> Fault:
    return Fault("enospc", number, WRITES, lasting)


ROWS = (
    Row("SIGKILL of the writer process at storage call k", partial(every_call, partial(Fault, "kill"))),
    Row("ENOSPC at write k of the writer process, once", partial(every_call, partial(_full, False))),
    Row("ENOSPC at write k of the writer process, from then on", partial(every_call, partial(_full, True))),
    Row("storage that does not answer, in the writer process", hanging),
)
