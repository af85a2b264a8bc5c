"""Cards: descriptions of what arenas hold, written next to them once the digests are known.

With the cards of all ranks of a host, the arenas are a checkpoint that needs no disk. A card is
deleted before its arena is filled again, so a card always describes the present contents.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.commit import BlockReport, Commit
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.shared_memory import is_own, read_private, replace_text
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError
from holdfast.core.host import host_identity
from holdfast.format import strictjson
from holdfast.plan.writer_job import WriterJob
from holdfast.writer.arena_owner import find_arenas, is_held_file
from holdfast.writer.messages import Values


def card_path(arena: str) -> str:
    return f"{arena}.card"


def has_card(arena: str) -> bool:
    """Return whether this user wrote a card for an arena."""
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
