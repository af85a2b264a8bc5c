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

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError
from holdfast.format import strictjson
from holdfast.persist.arena import read_private, replace_text


def card_path(arena: str) -> str:
    return f"{arena}.card"


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

    @property
    def step(self) -> int:
        return int(self.lineage["step"])

    def write(self) -> None:
        fields = {name: getattr(self, name) for name in self.__slots__}
        replace_text(card_path(self.arena), strictjson.dumps(fields))

    @staticmethod
    def read(path: Path) -> Card:
        """The card in a file; raises Damaged if it is not one."""
        fields = strictjson.loads(read_private(str(path), limits.JSON_BYTES), str(path))
        try:
            card = Card(**fields)
        except TypeError as error:
            raise Damaged(f"{path}: {error}") from None
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
