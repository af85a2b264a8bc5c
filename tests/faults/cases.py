"""What the rows share: cases that are tried one after another, and the rule they are judged by."""

from __future__ import annotations

import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.checkpoint.run_identity import run_id
from holdfast.storage.local import LocalStorage
from holdfast.writer.startup_cleanup import clean_arenas
from tests.dist.harness import RankFailed
from tests.faults.row import HUNG, LOST, SURVIVED, WRONG, Tally

DEADLINE_S = 20.0  # of a start or a save that nothing disturbs
BLOCK_BYTES = 4096
_TOLD = 5  # failures of one row; the rest is counted

Case = tuple[str, Callable[[], object]]


class Lost(AssertionError):
    """An acknowledged checkpoint is not there, or the run cannot go on."""


class Wrong(AssertionError):
    """Something was taken for a checkpoint that is none, or wrong bytes were loaded."""


class Hung(AssertionError):
    """A call ran past its deadline."""


class NotInjected(Exception):
    """The fault did not happen, so that it counts for nothing."""


def run_cases(fault: str, seed: int, cases: Iterable[Case], *, limit_s: float = 60.0, at_once: int = 1) -> Tally:
    """Try every case; what fails is told on standard error with the way to see it again.

    Cases that mostly wait may be tried several `at_once`, on threads.
    """
    tally = Tally()
    with warnings.catch_warnings(), ThreadPoolExecutor(at_once) as pool:
        warnings.simplefilter("ignore")
        tried = partial(_try, limit_s)
        for name, error in map(tried, cases) if at_once == 1 else pool.map(tried, cases):
            if error is None:
                tally += SURVIVED
            elif not isinstance(error, NotInjected):
                tally += _judgement(error)
                if tally.injected - tally.survived <= _TOLD:
                    print(f"{fault}: {name}: {''.join(traceback.format_exception(error))}", file=sys.stderr)
                    print(f"again: python -m tests.faults --seed {seed} --only '{fault[:30]}'", file=sys.stderr)
    return tally


def _try(limit_s: float, case: Case) -> tuple[str, Exception | None]:
    name, function = case
    started = time.monotonic()
    try:
        function()
        seconds = time.monotonic() - started
        if seconds > limit_s:
            raise Hung(f"it took {seconds:.0f} s")
    except Exception as error:  # noqa: BLE001  (every case is tried, whatever became of the one before)
        return name, error
    return name, None


def afterwards(fault: str, seed: int, case: Callable[[], object]) -> Tally:
    """What must be true when all is over: no fault of its own, so it counts only if it fails."""
    tally = run_cases(fault, seed, [("afterwards", case)])
    return Tally() if tally.good else tally


def _judgement(error: Exception) -> Tally:
    if isinstance(error, Wrong):
        return WRONG
    late = isinstance(error, Hung | holdfast.TimedOut) or (
        isinstance(error, RankFailed) and "did not answer" in str(error)
    )
    return HUNG if late else LOST


def chance(seed: int, *names: object) -> random.Random:
    """Randomness that belongs to one case, whatever ran before it."""
    return random.Random(":".join(map(str, (seed, *names))))


@contextmanager
def fresh_root() -> Iterator[Path]:
    """A folder for one run; what the run left in memory is given back with it."""
    with tempfile.TemporaryDirectory(prefix="holdfast-faults-") as folder:
        root = Path(folder) / "run"
        try:
            yield root
        finally:
            clean_arenas(run_id(LocalStorage(root)))


def state_of(value: float) -> dict[str, Any]:
    """A small state of several blocks in which every element tells which one it is."""
    big = torch.arange(5000, dtype=torch.float32) + value * 5000
    return {"w": {"big": big, "small": torch.full((7, 5), float(value))}, "value": value}


def check_stored(checkpoint: holdfast.Checkpoint, values: Collection[float]) -> None:
    """Raise Wrong unless a checkpoint verifies and holds one of the `values`, all of it."""
    report = checkpoint.verify()
    if not report.good:
        raise Wrong(f"{checkpoint.path} is visible and damaged: {report.damage}")
    value = checkpoint.value("value")
    expected = state_of(value)["w"]
    same = all((checkpoint.read(key, "w") == expected[key].numpy()).all() for key in expected)
    if value not in values or not same:
        raise Wrong(f"{checkpoint.path} holds {value}, expected one of {sorted(values)}")


def check_root(root: Path, acknowledged: Mapping[int, Collection[float]]) -> None:
    """The rule, as a reader sees it: acknowledged steps are there, and whatever is visible is whole.

    `acknowledged` gives the values a step may have; another step holds its own number.
    """
    seen = set()
    for path in sorted(root.glob("step-*")):
        checkpoint = holdfast.open(path)
        step = int(path.name.removeprefix("step-"))
        check_stored(checkpoint, acknowledged.get(step, [step]))
        seen.add(step)
    missing = sorted(set(acknowledged) - seen)
    if missing:
        raise Lost(f"acknowledged and not there: {missing}")


def begin_again(root: Path, acknowledged: Mapping[int, Collection[float]]) -> int | None:
    """The next run: it starts, restores what is newest and right, and saves."""
    live = state_of(-1)
    with holdfast.Checkpointer(root, deadline_s=DEADLINE_S, block_bytes=BLOCK_BYTES) as checkpointer:
        found = checkpointer.restore(live)
        if (found if found is not None else -1) < max(acknowledged, default=-1):
            raise Lost(f"restored step {found}, acknowledged was {max(acknowledged)}")
        if found is not None:
            value = live["value"]
            same = all(torch.equal(live["w"][key], tensor) for key, tensor in state_of(value)["w"].items())
            if not same or value not in acknowledged.get(found, [found]):
                raise Wrong(f"restored step {found} with the value {value}, or a mix")
        following = 1 + max([found or 0, *acknowledged])
        checkpointer.save(following, state_of(following)).result(DEADLINE_S)
    check_root(root, {**acknowledged, following: [following]})
    left = [path.name for path in root.iterdir() if path.name.startswith((".attempt-", ".mail-"))]
    if left:
        raise Lost(f"the next run left {left}")
    return found
