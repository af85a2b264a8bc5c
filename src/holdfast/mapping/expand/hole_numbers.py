"""Which numbers a hole on the right stands for: from the targets, or from what later statements make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.mapping.expand.name_index import Names, moved
from holdfast.mapping.syntax.statement import STAR, Hole, Key, Statement

_FURTHEST = 20  # statements in a row


class Later:
    """A program and its targets, asked for the numbers of a hole in a key that one of its statements makes."""

    def __init__(
        self, statements: Sequence[Statement], targets: Names | None, spend: Callable[[int, Statement], None]
    ) -> None:
        self._statements = statements
        self._targets = targets
        self._spend = spend
        self._last_use: dict[str, int] | None = None
        self._used = Names()

    def numbers(self, key: Key, number: int) -> list[str]:
        """The digits that the only hole of `key` stands for, in numeric order; empty if nothing tells.

        The key is made by statement `number`: what counts are targets, and names that later statements use.
        """
        hole = key.holes[0].name
        last_use = self._index()
        by_name = {values[hole] for name, values in self._used.match(key) if last_use[name] > number}
        return sorted(by_name | self._numbers(key, number + 1, _FURTHEST), key=int)

    def _index(self) -> dict[str, int]:
        """The last statement that uses each name which is written out; built when first asked."""
        if self._last_use is None:
            self._last_use = {}
            for number, statement in enumerate(self._statements):
                self._spend(1, statement)
                for key in statement.lefts:
                    if not key.holes and key.array is None:
                        self._last_use[filled(key, "")] = number
            self._used = Names(self._last_use)
        return self._last_use

    def _numbers(self, key: Key, begin: int, far: int) -> set[str]:
        hole = key.holes[0].name
        found = {values[hole] for _, values in self._targets.match(key)} if self._targets is not None else set()
        if found or far <= 0:
            return found
        # A temporary: a later statement makes targets of it, under an id that stands in the place of the hole.
        samples = filled(key, "0"), filled(key, "1")
        for number in range(begin, len(self._statements)):
            statement = self._statements[number]
            self._spend(1, statement)
            for left in statement.lefts:
                ids = _placed(left, samples)
                if ids is None:
                    continue
                for right in statement.rights:
                    bound = bound_key(right, ids)
                    if bound is not None and bound.holes and right.array is None:
                        found |= self._numbers(bound, number + 1, far - 1)
                if found:
                    return found
        return found


def _placed(left: Key, samples: tuple[str, str]) -> dict[str, str] | None:
    """The ids of a later left key, without the one that stands where the two samples differ."""
    if left.array is not None:
        return None
    first, second = (next(iter(Names([sample]).match(left)), None) for sample in samples)
    if first is None or second is None:
        return None
    differing = [name for name, value in first[1].items() if second[1].get(name) != value]
    if len(differing) != 1 or differing[0] == STAR:
        return None
    return {name: value for name, value in first[1].items() if name != differing[0]}


def bound_key(key: Key, ids: Mapping[str, str]) -> Key | None:
    """The key with these ids filled in; None where an offset leads to no number."""
    pieces: list[str | Hole] = []
    for piece in key.pieces:
        if isinstance(piece, Hole) and piece.name in ids:
            digits = moved(ids[piece.name], piece.offset)
            if digits is None:
                return None
            pieces.append(digits)
        else:
            pieces.append(piece)
    return Key(tuple(pieces))


def filled(key: Key, digits: str) -> str:
    """The name that a key is with these digits in its holes."""
    return "".join((moved(digits, p.offset) or "") if isinstance(p, Hole) else p for p in key.pieces)
