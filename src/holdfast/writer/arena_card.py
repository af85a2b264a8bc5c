"""Cards: what an arena holds, written beside it once its digests are known.

With the cards of all ranks of a host, the arenas are a checkpoint that needs no disk. A card
is taken away before the arena is filled again, so a card always speaks of what is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.shared_memory import is_own, read_private, replace_text
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError
from holdfast.format import strictjson


def card_path(arena: str) -> str:
    return f"{arena}.card"


def has_card(arena: str) -> bool:
    """Whether there is a card that this user wrote beside an arena."""
    try:
        return is_own(os.lstat(card_path(arena)))
    except FileNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class Card:
    """One rank's arena: the attempt it was captured for, its job, block digests and values.

    `commit` is told by rank 0 alone. `arena_digest` is of the whole arena, where blocks have
    bytes of other hosts and so may have no digest of their own.
    """

    attempt: str
    lineage: Mapping[str, Any]
    rank: int
    arena: str
    job: Mapping[str, Any]
    commit: Mapping[str, Any] | None
    reports: Sequence[Sequence[Any]]
    values: Mapping[str, Any]
    arena_digest: str
    host: str
    root: str = ""  # the key that the root's identity gives: a state is restored under the root it was saved to, only

    @property
    def step(self) -> int:
        step: int = self.lineage["step"]
        return step

    def write(self) -> None:
        fields = {name: getattr(self, name) for name in self.__slots__}
        replace_text(card_path(self.arena), strictjson.dumps(fields))

    def _is_sound(self) -> bool:
        """Whether the fields are of the kinds that `write` wrote."""
        texts = (self.attempt, self.arena, self.arena_digest, self.host, self.root)
        numbers = (self.step, self.rank)
        return (
            all(isinstance(text, str) for text in texts)
            and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
            and all(isinstance(fields, dict) for fields in (self.job, self.values, self.commit or {}))
            and isinstance(self.job.get("plan"), str)
            and isinstance(self.reports, list)
        )

    @staticmethod
    def read(path: Path) -> Card:
        """The card in a file; raises Damaged if it is not one."""
        fields = strictjson.loads(read_private(str(path), limits.JSON_BYTES), str(path))
        try:
            card = Card(**fields)
            Lineage.from_fields(card.lineage)
        except (TypeError, KeyError, ValueError) as error:
            raise Damaged(f"{path}: {type(error).__name__}: {error}") from None
        if not card._is_sound():
            raise Damaged(f"{path}: a field of the card is odd")
        if card_path(card.arena) != os.fspath(path):
            raise Damaged(f"{path}: it is the card of another arena")
        return card


def read_cards(paths: Sequence[Path]) -> list[Card]:
    """Every card that can be read; one that cannot is as good as none."""
    cards = []
    for path in paths:
        try:
            cards.append(Card.read(path))
        except (HoldfastError, OSError):
            continue
    return cards
