"""What the rows of operations on checkpoints share: a folder with inputs and a target, faults there, and a judge."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

import holdfast
from holdfast.core.errors import HoldfastError
from holdfast.testing.system import SystemCall, watched_system
from tests.faults.row import LOST, SURVIVED, WRONG, Tally
from tests.faults.world import Hung, attempt, hung, in_child, told

MANIFEST = "holdfast.json"
TARGET = "made"
Files = dict[str, bytes]


def _write_another_model(folder: Path, target: Path) -> None:
    target.mkdir()
    save_file({"another": torch.ones(7)}, target / "model.safetensors")
    (target / "config.json").write_text('{"model_type": "another"}')


@dataclass(frozen=True)
class Operation:
    """Work on checkpoints: `prepare` writes the inputs into a folder, `work` replaces a target there.

    `occupy` writes what is at the target before: another model.
    """

    name: str
    prepare: Callable[[Path], object]
    work: Callable[[Path, Path], object]
    occupy: Callable[[Path, Path], object] = _write_another_model


def files_of(folder: Path) -> Files:
    """The bytes of all files of a folder but the manifest, which names the attempt and the time."""
    found = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.exists() else []
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.name != MANIFEST}


class Place:
    """A folder with the inputs of an operation, and a target that is absent or has another model."""

    def __init__(self, folder: Path, operation: Operation, *, occupied: bool) -> None:
        self.folder = folder
        self.operation = operation
        self.occupied = occupied
        self.target = folder / TARGET
        folder.mkdir()
        operation.prepare(folder)
        self.inputs = files_of(folder)
        self.reset()
        self.work()
        self.expected = files_of(self.target)
        self.before: Files = {}
        self.reset()

    def work(self) -> None:
        self.operation.work(self.folder, self.target)

    def reset(self) -> None:
        """Make the target as it was before the operation."""
        shutil.rmtree(self.target, ignore_errors=True)
        if self.occupied:
            self.operation.occupy(self.folder, self.target)
        self.before = files_of(self.target)

    def found_inputs(self) -> Files:
        """All files of the folder but those of the target."""
        return {name: data for name, data in files_of(self.folder).items() if not name.startswith(f"{TARGET}/")}

    def leftovers(self) -> list[str]:
        """The attempts in the folder."""
        return sorted(path.name for path in self.folder.iterdir() if path.name.startswith(".attempt"))


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """A folder in memory that goes when all is over."""
    torch.set_num_threads(1)  # threads do not survive a fork
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-faults-", dir=where) as name,
        mock.patch("holdfast.writer.startup_cleanup._UNKNOWN_HOST_S", 0.2),  # nobody else is at work here
    ):
        yield Path(name)


def judge(place: Place, acknowledged: bool | None, what: str) -> Tally:
    """Whether the inputs are untouched, the target is whole or as it was, and the next call works there."""
    if acknowledged is None:
        return told(WRONG, what, "an error was not translated")
    found = files_of(place.target)
    if found not in (place.before, place.expected):
        return told(WRONG, what, f"the target has {sorted(found)}, and is neither whole nor as it was")
    if acknowledged and found != place.expected:
        return told(LOST, what, "the target was acknowledged and is not there")
    if (place.target / MANIFEST).exists() and not holdfast.open(place.target).verify().good:
        return told(WRONG, what, "the target does not verify")
    try:
        place.work()
    except HoldfastError as error:
        return told(LOST, what, f"the next call fails: {error}")
    if files_of(place.target) != place.expected or place.leftovers():
        return told(LOST, what, f"the next call made something else, or left {place.leftovers()}")
    if place.found_inputs() != place.inputs:
        return told(WRONG, what, "the inputs have changed")
    return SURVIVED


Outcome = bool | str | None  # whether it was acknowledged, None for an odd error; "over" if there is no such call


def every_call(operation: Operation, occupied: bool, case: Callable[[Place, int], Outcome], fault: str) -> Tally:
    """Try the 1st, 2nd, ... call of an operation, until there are no more calls."""
    total = Tally()
    with fresh_folder() as folder:
        place = Place(folder / "place", operation, occupied=occupied)
        for number in range(1, 10_000):
            what = f"{fault}, {occupied=}, call {number}"
            place.reset()
            outcome = case(place, number)
            if outcome == "over":
                break
            if outcome == "hung":
                total += hung(what, 0.0)
                continue
            assert not isinstance(outcome, str)
            total += judge(place, outcome, what)
    return total


def killed(place: Place, number: int) -> Outcome:
    """Kill the process at one of its system calls."""

    def work() -> None:
        seen = 0

        def kill(call: SystemCall, work: Callable[[], Any]) -> Any:
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return work()

        with watched_system(kill):
            place.work()

    try:
        acknowledged, end = in_child(work)
    except Hung:
        return "hung"
    if end != signal.SIGKILL:
        return "over" if acknowledged else None
    return acknowledged


def failing(error: int, place: Place, number: int) -> Outcome:
    """Let one system call fail, and all after it."""
    seen = 0

    def fail(call: SystemCall, work: Callable[[], Any]) -> Any:
        nonlocal seen
        seen += 1
        if seen >= number:
            raise OSError(error, os.strerror(error), call.path)
        return work()

    def work() -> None:
        with watched_system(fail):
            place.work()

    acknowledged = attempt(work, f"call {number}")
    return acknowledged if seen >= number else "over"
