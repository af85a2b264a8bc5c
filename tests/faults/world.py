"""The small world that faults are injected into: a root with one committed step, jobs to do there, and a judge."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.adapters.comm import current_ranks
from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import HoldfastError, NotFound
from holdfast.core.names import step_folder
from holdfast.engine.blocking_save import BlockingSaver
from holdfast.engine.options import SaveOptions
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage
from tests.faults.row import HUNG, LOST, SURVIVED, WRONG, Tally

BLOCK_BYTES = 4096
DEADLINE_S = 30.0
Allowed = Mapping[int, frozenset[int | None]]  # of each step: the numbers its state may have, None if it may be absent


def state(number: int) -> dict[str, Any]:
    """A state that is all made of one number: two tensor files of several blocks, and a value."""
    return {
        "model": {"a": torch.full((1800,), float(number)), "b": torch.full((3, 5), number, dtype=torch.int32)},
        "ema": {"a": torch.full((700,), number + 0.5)},
        "number": number,
    }


def save(storage: Storage, step: int, number: int) -> None:
    """Save in the foreground."""
    saver = BlockingSaver(storage, SaveOptions(block_bytes=BLOCK_BYTES))
    saver.save(current_ranks(DEADLINE_S), step_folder(step), state(number), Lineage(step))


def save_and_remove(storage: Storage) -> None:
    save(storage, 2, 2)
    storage.remove(step_folder(1))


def _allowed(**steps: set[int | None]) -> Allowed:
    return {int(name.removeprefix("step")): frozenset(numbers) for name, numbers in steps.items()}


@dataclass(frozen=True)
class Job:
    """Work on a root that holds step 1 with number 1; what may be there meanwhile, and what must be there after."""

    name: str
    work: Callable[[Storage], None]
    meanwhile: Allowed
    after: Allowed


JOBS = (
    Job("a new step", lambda s: save(s, 2, 2), _allowed(step1={1}, step2={2, None}), _allowed(step1={1}, step2={2})),
    Job("a step again", lambda s: save(s, 1, 7), _allowed(step1={1, 7}), _allowed(step1={7})),
    Job("a step again, unchanged", lambda s: save(s, 1, 1), _allowed(step1={1}), _allowed(step1={1})),
    Job(
        "a new step, the old one removed",
        save_and_remove,
        _allowed(step1={1, None}, step2={2, None}),
        _allowed(step1={None}, step2={2}),
    ),
)


class World:
    """Roots in memory, each a copy of one with step 1 in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        self._template = folder / "template"
        save(LocalStorage(self._template), 1, 1)

    def copy(self) -> Path:
        """A root that stays as long as the world."""
        self._number += 1
        root = self.folder / f"root-{self._number}"
        shutil.copytree(self._template, root)
        return root

    @contextmanager
    def root(self) -> Iterator[Path]:
        root = self.copy()
        try:
            yield root
        finally:
            shutil.rmtree(root)


@contextmanager
def world() -> Iterator[World]:
    torch.set_num_threads(1)  # threads do not survive a fork
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="holdfast-faults-", dir=where) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield World(Path(folder))


def judge(root: Path, allowed: Allowed, what: str) -> Tally:
    """Whether a root is as it must be, to every byte, and the next save works there; says why not."""
    storage = LocalStorage(root)
    found: dict[int, int] = {}
    for entry in committed_steps(storage):
        if isinstance(entry.problem, NotFound):
            return told(WRONG, what, f"{entry.folder} is there without a manifest")
        try:
            report = Checkpoint(storage, entry.folder).verify()
            number = holdfast.open(root / entry.folder).value("number")
            fresh = state(0)
            holdfast.load(root / entry.folder, fresh)
        except HoldfastError as error:
            return told(WRONG, what, f"{entry.folder}: {error}")
        if not report.good or not same(fresh, state(number)):
            return told(WRONG, what, f"{entry.folder} is not what was saved")
        found[entry.step] = number
    for step, numbers in allowed.items():
        if found.get(step) not in numbers:
            return told(LOST, what, f"step {step} has {found.get(step)}, not one of {set(numbers)}")
    if not found:
        return told(LOST, what, "no step is left")
    try:
        save(storage, 9, 9)
    except HoldfastError as error:
        return told(LOST, what, f"the next save fails: {error}")
    return SURVIVED if 9 in {entry.step for entry in committed_steps(storage) if entry.manifest} else LOST


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["number"] == other["number"] and all(
        torch.equal(one[group][key], other[group][key]) for group in ("model", "ema") for key in other[group]
    )


def told(tally: Tally, what: str, why: str) -> Tally:
    print(f"  {what}: {why}", file=sys.stderr, flush=True)
    return tally


def attempt(work: Callable[[], None], what: str) -> bool | None:
    """Do a job: True if it is acknowledged, False if it raised as it should, None if it raised something else."""
    try:
        work()
    except HoldfastError:
        return False
    except Exception as error:  # noqa: BLE001  (an error of the system that nobody translated)
        told(WRONG, what, f"raised {error!r}")
        return None
    return True


def judged(root: Path, job: Job, acknowledged: bool | None, what: str) -> Tally:
    if acknowledged is None:
        return WRONG
    return judge(root, job.after if acknowledged else job.meanwhile, what)


class Hung(Exception):
    """A child did not end in time."""


def in_child(work: Callable[[], object], deadline_s: float = DEADLINE_S) -> tuple[bool, int]:
    """Do work in a fork of this process: whether it came to its end, and how the child ended (as waitpid has it)."""
    return in_children([work], deadline_s)[0]


def in_children(works: Sequence[Callable[[], object]], deadline_s: float = DEADLINE_S) -> list[tuple[bool, int]]:
    """Do several works, each in a fork of its own; raises Hung if one does not end in time."""
    children = [_fork(work) for work in works]
    end = time.monotonic() + deadline_s
    late = False
    ends = []
    for child, receiver in children:
        ready, _, _ = select.select([receiver], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            late = True
            os.kill(child, signal.SIGKILL)
        word = os.read(receiver, select.PIPE_BUF)
        os.close(receiver)
        if word[1:]:
            print(word[1:].decode(errors="replace"), file=sys.stderr)
        ends.append((word == b"+", os.waitpid(child, 0)[1]))
    if late:
        raise Hung
    return ends


def _fork(work: Callable[[], object]) -> tuple[int, int]:
    """A child, and the end of a pipe that says `+` when its work is done, `-` and why if not, and ends with it."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(receiver)
            work()
            os.write(sender, b"+")
            code = 0
        except HoldfastError:
            code = 0
        except Exception:  # noqa: BLE001  (the parent is told; this process may have been made quiet)
            os.write(sender, b"-" + traceback.format_exc().encode()[-select.PIPE_BUF + 1 :])
        finally:
            os._exit(code)
    os.close(sender)
    return child, receiver


def hung(what: str, started: float) -> Tally:
    return told(HUNG, what, f"it was still at it after {time.monotonic() - started:.0f} s")
