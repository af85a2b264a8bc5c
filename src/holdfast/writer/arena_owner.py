"""Arenas by name, and the trainer processes that own them.

An arena is named for its run, its rank and its trainer. A process id means something only within
its pid namespace: process 7 of one container is not process 7 of another. So the name has the
namespace too, and the time at which the process began.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.shared_memory import find_files, has_owner, is_held

_OWN_NAMESPACE = "/proc/self/ns/pid"
_NEW_S = 60.0  # how long a process of another container may take from creating an arena to locking it
_ARENA = re.compile(
    r"holdfast-[0-9a-f]{32}-[0-9]+-(?P<trainer>[0-9]+)-(?P<began>[0-9]+)-(?P<namespace>[0-9]+)-[0-9a-f]{32}"
)


def pid_namespace() -> int:
    """Return the number of this process's pid namespace, 0 if the system has none."""
    try:
        return os.stat(_OWN_NAMESPACE).st_ino
    except OSError:
        return 0


def began(pid: int) -> int:
    """Return when a process began, in ticks since boot; -1 if it is dead, even if its parent has not waited for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] == "Z" else int(fields[19])


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this host: its id, and the pid namespace of the id."""

    pid: int
    namespace: int

    @staticmethod
    def current() -> Process:
        return Process(os.getpid(), pid_namespace())

    def __str__(self) -> str:
        if self.namespace == pid_namespace():
            return f"process {self.pid}"
        return f"process {self.pid} of another container (pid namespace {self.namespace})"


@dataclass(frozen=True, slots=True)
class ArenaFile:
    """An arena of shared memory, with the trainer that its name gives."""

    path: Path
    trainer: Process
    began: int

    @staticmethod
    def at(path: Path) -> ArenaFile | None:
        """Parse the name of a file; None if it is not an arena's."""
        match = _ARENA.fullmatch(path.name)
        if match is None:
            return None
        return ArenaFile(path, Process(int(match["trainer"]), int(match["namespace"])), int(match["began"]))

    def trainer_lives(self) -> bool:
        """Return whether the trainer is alive: the same process, not a later one with its id.

        A process id of another pid namespace identifies nothing here. There, the trainer's lock on the arena counts.
        """
        try:
            if self.trainer.namespace == pid_namespace():
                return began(self.trainer.pid) == self.began
            return has_owner(str(self.path))
        except FileNotFoundError:
            return False

    def is_orphan(self) -> bool:
        """Return whether a writer holds the arena and its trainer is dead."""
        return not self.trainer_lives() and is_held_file(self.path)

    def is_claimed(self) -> bool:
        """Return whether the trainer is alive, or may be about to lock the new arena."""
        if self.trainer.namespace != pid_namespace() and self._age_s() < _NEW_S:
            return True
        return self.trainer_lives()

    def _age_s(self) -> float:
        try:
            return time.time() - self.path.stat().st_ctime
        except FileNotFoundError:
            return 0.0


def arena_prefix(run: str, rank: int) -> str:
    """Return the prefix of the names of arenas that this process creates for `rank`."""
    own = Process.current()
    return f"{run}-{rank}-{own.pid}-{began(own.pid)}-{own.namespace}-"


def find_arenas(run: str) -> list[ArenaFile]:
    """Return the arenas of a run on this host."""
    return [arena for path in find_files(run) if (arena := ArenaFile.at(path)) is not None]


def trainers(run: str) -> set[Process]:
    """Return the living processes of this host that have arenas of the run."""
    return {arena.trainer for arena in find_arenas(run) if arena.trainer_lives()}


def is_held_file(path: Path) -> bool:
    """Return whether a living process holds a file of shared memory; False if the file is gone."""
    try:
        return is_held(str(path))
    except FileNotFoundError:
        return False
