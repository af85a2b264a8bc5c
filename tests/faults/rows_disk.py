"""Disks that fill: at every write in turn, for one save or for several. Training goes on all the same."""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import holdfast
from holdfast.core.names import step_folder
from tests.faults.cases import (
    BLOCK_BYTES,
    DEADLINE_S,
    Case,
    Hung,
    NotInjected,
    Wrong,
    afterwards,
    begin_again,
    check_root,
    fresh_root,
    run_cases,
    state_of,
)
from tests.faults.row import Row, Tally

PAGE = 4096
_TMPFS_BYTES = 4 << 20


class Full:
    """A run whose disk is full from time to time, and says how a save fares then."""

    def __init__(self, root: Path, expected: str) -> None:
        self.root = root
        self._expected = expected
        self.step = 1
        self.checkpointer = holdfast.Checkpointer(root, deadline_s=DEADLINE_S, block_bytes=BLOCK_BYTES)
        self.checkpointer.save(1, state_of(1)).result(DEADLINE_S)

    @property
    def writer(self) -> int:
        background: Any = self.checkpointer._engine.background
        return int(background.writer.pid)

    def try_to_save(self) -> bool:
        """Whether a save fails; then the error must say why."""
        self.step += 1
        handle = self.checkpointer.save(self.step, state_of(self.step))
        if not handle.wait(DEADLINE_S):
            raise Hung("no word of the save")
        if handle.error is None:
            self._remove_old()
            return False
        if not isinstance(handle.error, holdfast.StorageError) or self._expected not in str(handle.error):
            raise Wrong(f"the error is not clear: {handle.error!r}")
        return True

    def _remove_old(self) -> None:
        """All but the newest step: the disk is small."""
        storage = holdfast.storage.storage_at(self.root)
        for path in sorted(self.root.glob("step-*"))[:-1]:
            storage.remove(path.name)
        storage.sweep()

    def case(self, fill: Callable[[], None], empty: Callable[[], None], saves: int) -> None:
        """Some saves on a full disk, then one on a disk with room."""
        before = {int(path.name[5:]): {float(int(path.name[5:]))} for path in self.root.glob("step-*")}
        fill()
        try:
            failed = [self.try_to_save() for _ in range(saves)]
        finally:
            empty()
        if not any(failed):
            raise NotInjected
        check_root(self.root, before if all(failed) else {})
        if self.try_to_save():
            raise Wrong("a save failed on a disk with room")
        check_root(self.root, {self.step: {float(self.step)}})


def _cases(run: Full, amounts: list[int], fill: Callable[[int], None], empty: Callable[[], None]) -> Iterator[Case]:
    for amount in amounts:
        for saves, name in ((1, "transient"), (2, "persistent")):
            yield f"room for {amount} bytes, {name}", partial(run.case, partial(fill, amount), empty, saves)


def file_size_limit(seed: int, every: int = 1) -> Tally:
    """The writer may write no byte beyond a limit: EFBIG, at each size that a write of a save ends at."""
    with fresh_root() as root:
        run = Full(root, "File too large")
        try:
            sizes = [path.stat().st_size for path in (root / step_folder(1)).iterdir()]
            largest = max(sizes)
            amounts = sorted(
                {0, 1, 10, 30, 60, 90, *(size - 1 for size in sizes), *range(0, largest, BLOCK_BYTES // 2)}
            )

            def limit(amount: int) -> None:
                resource.prlimit(run.writer, resource.RLIMIT_FSIZE, (amount, resource.RLIM_INFINITY))

            cases = _cases(run, amounts[::every], limit, lambda: limit(resource.RLIM_INFINITY))
            tally = run_cases(LIMITED, seed, cases)
        finally:
            run.checkpointer.close()
        return tally + afterwards(LIMITED, seed, partial(begin_again, root, {run.step: {run.step}}))


@contextmanager
def small_disk() -> Iterator[Path]:
    """A tmpfs of a few megabytes."""
    with tempfile.TemporaryDirectory(prefix="holdfast-small-") as folder:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_TMPFS_BYTES}", "tmpfs", folder], check=True, capture_output=True
        )
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True, capture_output=True)


@functools.cache
def no_small_disk() -> str:
    """Why no tmpfs can be mounted here; empty if it can. Ranks and victims do not try it."""
    if multiprocessing.parent_process() is not None:
        return ""
    if os.geteuid():
        return "only root may mount a tmpfs"
    try:
        with small_disk():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no tmpfs: {getattr(error, 'stderr', b'') or error}"[:60]


def full_disk(seed: int, every: int = 1) -> Tally:
    """A disk that has room for so many pages and no more: ENOSPC, from the first page of a save to its last."""
    with small_disk() as folder:
        root, ballast = folder / "run", folder / "ballast"
        run = Full(root, "No space left")
        try:

            def fill(amount: int) -> None:
                room = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - amount
                with ballast.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, max(1, room))

            amounts = list(range(0, 24 * PAGE, PAGE))[::every]
            tally = run_cases(FILLED, seed, _cases(run, amounts, fill, ballast.unlink))
        finally:
            run.checkpointer.close()
        return tally + afterwards(FILLED, seed, partial(begin_again, root, {run.step: {run.step}}))


FILLED = "a disk that fills at every write in turn: small tmpfs"
LIMITED = "a disk that fills at every write in turn: RLIMIT_FSIZE" + (
    f" (no tmpfs: {no_small_disk()})" if no_small_disk() else ""
)
ROWS = (Row(LIMITED, file_size_limit), *(() if no_small_disk() else (Row(FILLED, full_disk),)))
