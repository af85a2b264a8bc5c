"""Processes of this host: whether one lives, and which ones have a file open.

A process number means something only within its pid namespace: the process 7 of one container
is not the process 7 of another. So what is named for a process is named for its namespace too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_OWN_SPACE = "/proc/self/ns/pid"


def pid_space() -> int:
    """Return the number of this process's pid namespace, 0 where the system has none."""
    try:
        return os.stat(_OWN_SPACE).st_ino
    except OSError:
        return 0


def began(process: int) -> int:
    """Return when a process began, in ticks since the boot; -1 if it is dead, even if its parent has not looked yet."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] == "Z" else int(fields[19])


@dataclass(frozen=True, slots=True)
class Process:
    """A process, with the pid namespace that its number belongs to."""

    number: int
    space: int

    @staticmethod
    def current() -> Process:
        return Process(os.getpid(), pid_space())

    def __str__(self) -> str:
        if self.space == pid_space():
            return f"process {self.number}"
        return f"process {self.number} of another container (pid namespace {self.space})"


def holders(paths: Iterable[Path]) -> list[int]:
    """Return the processes, of this user and namespace, that have one of the files or folders open.

    This process is not among them.
    """
    wanted = set()
    for path in paths:
        with contextlib.suppress(OSError):  # it has gone: then nobody holds it
            status = path.stat()
            wanted.add((status.st_dev, status.st_ino))
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted(process for process in found if process != os.getpid() and _has_open(process, wanted))


def _has_open(process: int, wanted: set[tuple[int, int]]) -> bool:
    try:
        descriptors = list(os.scandir(f"/proc/{process}/fd"))
    except OSError:
        return False  # another user's, or gone
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            status = os.stat(descriptor.path)
            if (status.st_dev, status.st_ino) in wanted:
                return True
    return False
