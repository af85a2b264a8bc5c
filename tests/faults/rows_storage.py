"""A storage that fails at every call in turn, in the foreground: killed, full, broken, short."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.storage.local import LocalStorage
from holdfast.testing.faults import Fault, FaultGate, faulty
from holdfast.testing.system import SystemCall, watched_system
from tests.faults.row import WRONG, Row, Tally
from tests.faults.world import JOBS, Hung, Job, attempt, hung, in_child, judged, world

ERRORS = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT, "EIO": errno.EIO}
Case = Callable[[Path, Job, int, str], Tally | None]


def every_call(case: Case, fault: str, seed: int) -> Tally:
    """A case for each job and the 1st, 2nd, ... call of it, until there are no more calls."""
    total = Tally()
    with world() as here:
        for job in JOBS:
            for number in range(1, 10_000):
                with here.root() as root:
                    tally = case(root, job, number, f"{fault}, {job.name}, call {number}, seed {seed}")
                if tally is None:
                    break
                total += tally
    return total


def killed_at_storage_call(root: Path, job: Job, number: int, what: str) -> Tally | None:
    storage = faulty(LocalStorage(root), Fault("kill", number), quiet=True)
    return _killed(root, job, lambda: job.work(storage), what)


def killed_at_system_call(root: Path, job: Job, number: int, what: str) -> Tally | None:
    def work() -> None:
        seen = 0

        def kill(call: SystemCall, work: Callable[[], Any]) -> Any:
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return work()

        with watched_system(kill):
            job.work(LocalStorage(root))

    return _killed(root, job, work, what)


def _killed(root: Path, job: Job, work: Callable[[], None], what: str) -> Tally | None:
    started = time.monotonic()
    try:
        acknowledged, end = in_child(work)
    except Hung:
        return hung(what, started)
    if end != signal.SIGKILL:
        return None if acknowledged else WRONG
    return judged(root, job, acknowledged, what)


def failing_storage_call(name: str, lasting: bool, root: Path, job: Job, number: int, what: str) -> Tally | None:
    return _failing(Fault(name, number, lasting=lasting), root, job, what)


def _failing(fault: Fault, root: Path, job: Job, what: str) -> Tally | None:
    storage = faulty(LocalStorage(root), fault, quiet=True)
    acknowledged = attempt(lambda: job.work(storage), what)
    gate = storage.gate
    assert isinstance(gate, FaultGate)
    return judged(root, job, acknowledged, what) if gate.done else None


def short_write(root: Path, job: Job, number: int, what: str) -> Tally | None:
    return _failing(Fault("short", number, "write|put"), root, job, what)


def failing_system_call(error: int, lasting: bool, root: Path, job: Job, number: int, what: str) -> Tally | None:
    seen = 0

    def fail(call: SystemCall, work: Callable[[], Any]) -> Any:
        nonlocal seen
        seen += 1
        if seen == number or (lasting and seen > number):
            raise OSError(error, os.strerror(error), call.path)
        return work()

    def work() -> None:
        with watched_system(fail):
            job.work(LocalStorage(root))

    acknowledged = attempt(work, what)
    return judged(root, job, acknowledged, what) if seen >= number else None


def _row(fault: str, case: Case) -> Row:
    return Row(fault, partial(every_call, case, fault))


HOW_LONG = {"once": False, "from then on": True}
ROWS = (
    _row("SIGKILL at storage call k, every k", killed_at_storage_call),
    _row("SIGKILL at file system call k, every k", killed_at_system_call),
    *(
        _row(f"{name} at storage call k, {when}", partial(failing_storage_call, name.lower(), lasting))
        for name in ERRORS
        for when, lasting in HOW_LONG.items()
    ),
    *(
        _row(f"{name} at file system call k, {when}", partial(failing_system_call, number, lasting))
        for name, number in ERRORS.items()
        for when, lasting in HOW_LONG.items()
    ),
    _row("short write at storage call k", short_write),
)
