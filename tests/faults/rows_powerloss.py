"""Power loss: every legal state of the disk after every operation of a recorded save."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import HoldfastError
from holdfast.core.names import step_folder
from holdfast.storage.local import LocalStorage
from holdfast.testing.disk import DiskRecording, Mark, recorded
from holdfast.testing.judging import Promise, RunJudge, judge_steps
from holdfast.testing.powerloss import Judge, judge_all
from holdfast.testing.system import SystemCall, watched_system
from tests.faults.row import Row, Tally
from tests.faults.threads import writers_on_threads
from tests.faults.world import BLOCK_BYTES, save, state, world

RUN = "run"


def attempt_of(storage: LocalStorage, step: int) -> str:
    return Checkpoint(storage, step_folder(step)).manifest.attempt


def fresh(storage: LocalStorage, recording: DiskRecording) -> None:
    save(storage, 1, 1)
    recording.mark(Promise(1, (attempt_of(storage, 1),)))


def with_retention(storage: LocalStorage, recording: DiskRecording) -> None:
    recording.mark(Promise(1, (attempt_of(storage, 1),)))
    save(storage, 2, 2)
    recording.mark(Promise(2, (attempt_of(storage, 2),)))
    recording.mark(Promise(1, ()))
    storage.remove(step_folder(1))


def again(storage: LocalStorage, recording: DiskRecording) -> None:
    older = attempt_of(storage, 1)
    try:
        save(storage, 1, 7)
    finally:
        newer = attempt_of(storage, 1)
        recording.operations.insert(0, Mark(Promise(1, tuple({older, newer, *_attempts(recording)}))))
    recording.mark(Promise(1, (newer,)))


def background(storage: LocalStorage, recording: DiskRecording) -> None:
    """A save of a Checkpointer, whose writer works on a thread of this process so that its calls are seen."""
    recording.mark(Promise(1, (attempt_of(storage, 1),)))
    with writers_on_threads(), holdfast.Checkpointer(storage, block_bytes=BLOCK_BYTES) as checkpointer:
        checkpointer.save(2, state(2)).result()
        recording.mark(Promise(2, (attempt_of(storage, 2),)))


def _attempts(recording: DiskRecording) -> set[str]:
    """The attempts that were begun: a save that fails may still be found complete."""
    changes = [change for operation in recording.operations for change in getattr(operation, "changes", ())]
    return {name for _, name, _ in changes if name.startswith(".attempt-")}


Work = Callable[[LocalStorage, DiskRecording], None]
SAVES: dict[str, tuple[int, Work]] = {
    "a fresh save": (0, fresh),
    "a save with retention": (1, with_retention),
    "a step saved again": (1, again),
}


# Each with how many of its states are judged, one of so many: a background save has some 17,000.
RUNS = {**{name: (*save, 1) for name, save in SAVES.items()}, "a background save": (1, background, 7)}


@contextmanager
def record(steps: int, work: Work) -> Iterator[tuple[DiskRecording, Path]]:
    """What a save does to a disk that holds `steps` steps, under a root of its own."""
    with world() as here:
        top = here.folder / "disk"
        top.mkdir()
        for step in range(1, steps + 1):
            save(LocalStorage(top / RUN), step, step)
        with recorded(top) as recording:
            try:
                work(LocalStorage(top / RUN), recording)
            except HoldfastError:
                pass  # a fault was put in: what was promised before still holds
        yield recording, here.folder


def power_loss(steps: int, work: Work, seed: int, every: int = 1) -> Tally:
    with record(steps, work) as (recording, folder):
        return judged(recording, folder, every=every)


def go_on_after(steps: int, work: Work, every: int, seed: int) -> Tally:
    """From every state a run is started: it restores what was promised, saves, and gc leaves nothing of dead saves."""
    with record(steps, work) as (recording, folder):
        return judged(recording, folder, RunJudge(lambda: state(0)), every)


def judged(recording: DiskRecording, folder: Path, judge: Judge = judge_steps, every: int = 1) -> Tally:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        outcome = judge_all(recording, judge, root=RUN, scratch=Path(scratch), every=every)
    for verdict, point in outcome.bad[:5]:
        print(f"  after operation {point}: {verdict}", file=sys.stderr)
    corrupt = outcome.count("corrupt")
    return Tally(outcome.states, outcome.states - len(outcome.bad), lost=len(outcome.bad) - corrupt, wrong=corrupt)


def failing_sync(steps: int, work: Work, number: int, storage: LocalStorage, recording: DiskRecording) -> None:
    """The same save with an fsync that fails: what it promised to make certain is not."""
    seen = 0

    def fail(call: SystemCall, do: Callable[[], Any]) -> Any:
        nonlocal seen
        seen += call.name == "fsync"
        if call.name == "fsync" and seen == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO), call.path)
        return do()

    with watched_system(fail):
        work(storage, recording)


def power_loss_after_failed_sync(steps: int, work: Work, seed: int, every: int = 1) -> Tally:
    with record(steps, work) as (recording, _):
        syncs = sum(type(operation).__name__ == "Sync" for operation in recording.operations)
    total = Tally()
    for number in range(1, syncs + 1, every):
        with record(steps, partial(failing_sync, steps, work, number)) as (recording, folder):
            total += judged(recording, folder)
    return total


ROWS = (
    *(Row(f"power loss: {name}", partial(power_loss, *save), counted=False) for name, save in SAVES.items()),
    *(
        Row(f"power loss, then a start: {name}", partial(go_on_after, *run), counted=False)
        for name, run in RUNS.items()
    ),
    *(
        Row(f"power loss after fsync k failed: {name}", partial(power_loss_after_failed_sync, *save), counted=False)
        for name, save in SAVES.items()
    ),
)
