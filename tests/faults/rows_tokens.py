"""Vocabularies that are resized while the process is killed, or the disk is full or broken, at every call in turn."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.core.errors import HoldfastError
from holdfast.testing.system import SystemCall, watched_system
from holdfast.tokens.resize_vocabulary import ResizeOptions, resize_vocab
from tests.faults.row import LOST, SURVIVED, WRONG, Row, Tally
from tests.faults.world import Hung, attempt, hung, in_child, told

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
OPTIONS = ResizeOptions(size=96, keys=("*table*",))
FORMATS = ("holdfast", "hf")


@dataclass(frozen=True)
class Place:
    """A folder with a source, and the files that a resize of it makes."""

    folder: Path
    form: str
    made: dict[str, bytes]

    def resize(self, *, force: bool = False) -> None:
        resize_vocab(self.folder / "source", self.folder / "made", OPTIONS, to=self.form, force=force)


def files_of(folder: Path) -> dict[str, bytes]:
    """The bytes of all files but the manifest, which names the attempt and the time."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "holdfast.json"}


@contextmanager
def places() -> Iterator[Callable[[str], Path]]:
    """Make copies of a folder with a step of a model and its optimizer."""
    torch.set_num_threads(1)  # threads do not survive a fork
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="holdfast-faults-", dir=where) as name:
        folder, number = Path(name), 0
        model = torch.nn.ModuleDict({"table": torch.nn.Embedding(40, 64), "other": torch.nn.Linear(64, 32)})
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        holdfast.save(folder / "template" / "source", {"model": model, "optimizer": optimizer}, block_bytes=4096)

        def copy(form: str) -> Path:
            nonlocal number
            number += 1
            made = folder / f"{form}-{number}"
            shutil.copytree(folder / "template", made)
            return made

        yield copy


def judge(place: Place, source: dict[str, bytes], acknowledged: bool | None, what: str) -> Tally:
    """Whether the source is untouched, the destination whole or absent, and the next resize works there."""
    made = place.folder / "made"
    if acknowledged is None or files_of(place.folder / "source") != source:
        return told(WRONG, what, "the source has changed, or an error was not translated")
    if made.exists() and files_of(made) != place.made:
        return told(WRONG, what, f"the destination has {sorted(files_of(made))}, and is not whole")
    if acknowledged and not made.exists():
        return told(LOST, what, "the destination was acknowledged and is not there")
    if made.exists() and place.form == "holdfast" and not holdfast.open(made).verify().good:
        return told(WRONG, what, "the destination does not verify")
    try:
        place.resize(force=True)
    except HoldfastError as error:
        return told(LOST, what, f"the next resize fails: {error}")
    left = [path.name for path in place.folder.iterdir() if path.name not in ("source", "made")]
    if files_of(made) != place.made or any(name.startswith(".attempt") for name in left):
        return told(LOST, what, f"the next resize made something else, or left {left}")
    return SURVIVED


def every_call(case: Callable[[Place, int], bool | str | None], fault: str, seed: int) -> Tally:
    """Try the 1st, 2nd, ... call of a resize to every format, until there are no more calls."""
    total = Tally()
    with places() as copy:
        for form in FORMATS:
            whole = Place(copy(form), form, {})
            whole.resize()
            made = files_of(whole.folder / "made")
            source = files_of(whole.folder / "source")
            for number in range(1, 10_000):
                place = Place(copy(form), form, made)
                what = f"{fault}, {form}, call {number}, seed {seed}"
                outcome = case(place, number)
                if outcome == "over":
                    break
                if outcome == "hung":
                    total += hung(what, 0.0)
                    continue
                assert not isinstance(outcome, str)
                total += judge(place, source, outcome, what)
                shutil.rmtree(place.folder)
    return total


def killed(place: Place, number: int) -> bool | str | None:
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
            place.resize()

    try:
        acknowledged, end = in_child(work)
    except Hung:
        return "hung"
    if end != signal.SIGKILL:
        return "over" if acknowledged else None
    return acknowledged


def failing(error: int, place: Place, number: int) -> bool | str | None:
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
            place.resize()

    acknowledged = attempt(work, f"call {number}")
    return acknowledged if seen >= number else "over"


KILLS = "resize-vocab: SIGKILL at file system call k, every k"
ROWS = (
    Row(KILLS, partial(every_call, killed, KILLS)),
    *(
        Row(
            f"resize-vocab: {name} at file system call k, from then on",
            partial(every_call, partial(failing, number), f"resize-vocab: {name}"),
        )
        for name, number in ERRORS.items()
    ),
)
