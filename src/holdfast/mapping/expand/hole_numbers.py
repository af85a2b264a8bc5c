"""The numbers that fill a hole which only right keys have, from the targets or from later statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.mapping.expand.name_index import NameIndex, shifted
from holdfast.mapping.syntax.statement import STAR, Hole, Key, Statement

_MAX_DEPTH = 20  # statements in a row


class HoleNumbers:
    """Finds the numbers of a hole in a key that one of the program's statements makes."""

    def __init__(
        self, statements: Sequence[Statement], targets: NameIndex | None, spend: Callable[[int, Statement], None]
    ) -> None:
        self._statements = statements
        self._targets = targets
        self._spend = spend
        self._last_use: dict[str, int] | None = None
        self._used = NameIndex()

    def numbers(self, key: Key, number: int) -> list[str]:
        """Return the digits that fill the only hole of `key`, in numeric order; empty if unknown.

        Statement `number` makes the key. The digits come from targets and from names that later statements use.
        """
        hole = key.holes[0].name
        last_use = self._index()
        by_name = {values[hole] for name, values in self._used.match(key) if last_use[name] > number}
        return sorted(by_name | self._numbers(key, number + 1, _MAX_DEPTH), key=int)

    def _index(self) -> dict[str, int]:
        """Map each literal name to the last statement that uses it. Built on first use."""
        if self._last_use is None:
            self._last_use = {}
            for number, statement in enumerate(self._statements):
                self._spend(1, statement)
                for key in statement.lefts:
                    if not key.holes and key.array is None:
                        self._last_use[filled(key, "")] = number
            self._used = NameIndex(self._last_use)
        return self._last_use

    def _numbers(self, key: Key, begin: int, depth: int) -> set[str]:
        hole = key.holes[0].name
        found = {values[hole] for _, values in self._targets.match(key)} if self._targets is not None else set()
        if found or depth <= 0:
            return found
        # A temporary: a later statement turns it into targets, with an id in place of the hole.
        samples = filled(key, "0"), filled(key, "1")
        for number in range(begin, len(self._statements)):
            statement = self._statements[number]
            self._spend(1, statement)
            for left in statement.lefts:
                ids = _other_ids(left, samples)
                if ids is None:
                    continue
                for right in statement.rights:
                    bound = bound_key(right, ids)
                    if bound is not None and bound.holes and right.array is None:
                        found |= self._numbers(bound, number + 1, depth - 1)
                if found:
                    return found
        return found


def _other_ids(left: Key, samples: tuple[str, str]) -> dict[str, str] | None:
    """Return the ids of a later left key, without the id at the position where the two samples differ."""
    if left.array is not None:
        return None
    first, second = (next(iter(NameIndex([sample]).match(left)), None) for sample in samples)
    if first is None or second is None:
        return None
    differing = [name for name, value in first[1].items() if second[1].get(name) != value]
    if len(differing) != 1 or differing[0] == STAR:
        return None
    return {name: value for name, value in first[1].items() if name != differing[0]}


def bound_key(key: Key, ids: Mapping[str, str]) -> Key | None:
    """Fill these ids into the key; None if an offset gives an invalid number."""
    pieces: list[str | Hole] = []
    for piece in key.pieces:
        if isinstance(piece, Hole) and piece.name in ids:
            digits = shifted(ids[piece.name], piece.offset)
            if digits is None:
                return None
            pieces.append(digits)
        else:
            pieces.append(piece)
    return Key(tuple(pieces))


def filled(key: Key, digits: str) -> str:
    """Return the name of a key with these digits in its holes."""
    return "".join((shifted(digits, p.offset) or "") if isinstance(p, Hole) else p for p in key.pieces)
