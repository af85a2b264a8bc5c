"""Arenas on a host: names that tell run, rank and trainer, trainers alive or dead, and cards of what they hold.

An arena is named for its run, its rank and its trainer. A process id means something only within
its pid namespace: process 7 of one container is not process 7 of another. So the name has the
namespace too, and the time at which the process began.

A card is written next to its arena once the digests are known. With the cards of all ranks of a
host, the arenas are a checkpoint that needs no disk. A card is deleted before its arena is filled
again, so a card always describes the present contents.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.commit import BlockReport, Commit
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.shared_memory import find_files, has_owner, is_held, is_own, read_private, replace_text
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError
from holdfast.core.ranks import host_identity
from holdfast.format import strictjson
from holdfast.plan.writer_job import WriterJob
from holdfast.writer.messages import Values

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

    @property
    def run(self) -> str:
        """The key of the run's root."""
        return self.path.name.split("-")[1]

    @property
    def rank(self) -> int:
        return int(self.path.name.split("-")[2])

    def trainer_lives(self) -> bool:
        """Return True if the trainer is alive: the same process, not a later one with its id.

        A process id of another pid namespace identifies nothing here. There, the trainer's lock on the arena counts.
        """
        try:
            if self.trainer.namespace == pid_namespace():
                return began(self.trainer.pid) == self.began
            return has_owner(str(self.path))
        except FileNotFoundError:
            return False

    def is_orphan(self) -> bool:
        """Return True if a writer holds the arena and its trainer is dead."""
        return not self.trainer_lives() and is_held_file(self.path, once=True)

    def is_claimed(self) -> bool:
        """Return True if the trainer is alive, or may be about to lock the new arena."""
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


def is_held_file(path: Path, *, once: bool = False) -> bool:
    """Return True if a living process holds a file of shared memory; False if the file is gone."""
    try:
        return is_held(str(path), once=once)
    except FileNotFoundError:
        return False


def card_path(arena: str) -> str:
    return f"{arena}.card"


def has_card(arena: str) -> bool:
    """Return True if this user wrote a card for an arena."""
    try:
        return is_own(os.lstat(card_path(arena)))
    except FileNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class Card:
    """One rank's arena: the attempt that it was captured for, its job, block digests and values.

    Only rank 0's card has a `commit`. If blocks have bytes of other hosts, they may lack digests;
    then `arena_digest` covers the whole arena.
    """

    attempt: str
    lineage: Lineage
    rank: int
    arena: str
    job: WriterJob
    commit: Commit | None
    reports: tuple[BlockReport, ...]
    values: Values
    arena_digest: str
    host: str
    root: str = ""  # the key of the root's identity: a state is restored only under the root that it was saved to

    @property
    def step(self) -> int:
        assert self.lineage.step is not None
        return self.lineage.step

    def fields(self) -> dict[str, Any]:
        """Return the JSON form. Other versions read it: the format is fixed."""
        return {
            "attempt": self.attempt,
            "lineage": self.lineage.fields(),
            "rank": self.rank,
            "arena": self.arena,
            "job": self.job.fields(),
            "commit": None if self.commit is None else self.commit.fields(),
            "reports": [report.fields() for report in self.reports],
            "values": self.values,
            "arena_digest": self.arena_digest,
            "host": self.host,
            "root": self.root,
        }

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> Card:
        """Decode the JSON form; raises an error of Python if it is invalid."""
        card = Card(
            **{
                **fields,
                "lineage": Lineage.from_fields(fields["lineage"]),
                "job": WriterJob.from_fields(fields["job"]),
                "commit": None if fields["commit"] is None else Commit.from_fields(fields["commit"]),
                "reports": tuple(map(BlockReport.from_fields, fields["reports"])),
            }
        )
        texts = (card.attempt, card.arena, card.arena_digest, card.host, card.root, card.job.plan)
        numbers = (card.lineage.step, card.rank)
        if not all(isinstance(text, str) for text in texts) or not isinstance(card.values, dict):
            raise TypeError("a field has the wrong type")
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("the step or the rank is not a number")
        return card

    def write(self) -> None:
        replace_text(card_path(self.arena), strictjson.dumps(self.fields()))

    @staticmethod
    def read(path: Path) -> Card:
        """Read a card; raises Damaged if the file is not one."""
        fields = strictjson.loads(read_private(str(path), limits.JSON_BYTES), str(path))
        try:
            card = Card.from_fields(fields)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise Damaged(f"{path}: {type(error).__name__}: {error}") from None
        if card_path(card.arena) != os.fspath(path):
            raise Damaged(f"{path}: it is the card of another arena")
        return card


def read_cards(paths: Sequence[Path]) -> list[Card]:
    """Read the cards; an unreadable one counts as absent."""
    cards = []
    for path in paths:
        try:
            cards.append(Card.read(path))
        except (HoldfastError, OSError):
            continue
    return cards


def captured_sets(run: str) -> dict[str, list[Card]]:
    """Return the cards of arenas on this host that no process holds, by attempt, in the order of ranks."""
    paths = [arena.path for arena in find_arenas(run)]
    cards = read_cards([Path(card_path(str(path))) for path in paths if not is_held_file(path)])
    by_attempt: dict[str, list[Card]] = {}
    for card in sorted(cards, key=lambda card: card.rank):
        if card.host == host_identity() and card.root == run:
            by_attempt.setdefault(card.attempt, []).append(card)
    return {
        attempt: members
        for attempt, members in by_attempt.items()
        if len({card.job.plan for card in members}) == 1 and len({card.rank for card in members}) == len(members)
    }


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state in the memory of this host that was captured and never written."""

    step: int
    paths: tuple[str, ...]
    size: int


def kept_states(run: str) -> list[KeptState]:
    """Return the captured states that no process holds: the next start under their root restores the newest."""
    found = []
    for cards in captured_sets(run).values():
        paths = tuple(card.arena for card in cards)
        sizes = [Path(path).stat().st_size for path in paths if Path(path).exists()]
        found.append(KeptState(cards[0].step, paths, sum(sizes)))
    return sorted(found, key=lambda state: state.step)
