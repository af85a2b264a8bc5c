"""Names by pattern: which of many keys match one that has holes, without looking at them all."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from holdfast.mapping.syntax.statement import Hole, Key

_RUN = re.compile(r"([0-9]+)")
_HOLES_AND_DIGITS = re.compile("([0-9\0]+)")
_LONGEST_RUN = 18
_NEAREST_AMONG = 3000

Skeleton = tuple[str, ...]
Digits = tuple[str, ...]
Positions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of digits of a pattern: literal, or a hole perhaps with digits beside it."""

    before: str
    hole: Hole | None
    after: str

    def value(self, digits: str) -> str | None:
        """The digits in the hole, or None if the run is another one."""
        end = len(digits) - len(self.after)
        if end <= len(self.before) or not digits.startswith(self.before) or not digits.endswith(self.after):
            return None
        found = digits[len(self.before) : end]
        return found if len(found) <= _LONGEST_RUN else None


class Names:
    """A set of names, kept apart by their text without digits, and by digits where a pattern has them."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: dict[str, None] = {}
        self._buckets: dict[Skeleton, dict[Positions, dict[Digits, dict[Digits, str]]]] = {}
        for name in names:
            self.add(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def add(self, name: str) -> None:
        if name in self._names:
            return
        self._names[name] = None
        skeleton, digits = _split(name)
        views = self._buckets.setdefault(skeleton, {(): {}})
        for positions, view in views.items():
            view.setdefault(tuple(digits[at] for at in positions), {})[digits] = name

    def discard(self, name: str) -> None:
        if name not in self._names:
            return
        del self._names[name]
        skeleton, digits = _split(name)
        for positions, view in self._buckets[skeleton].items():
            del view[tuple(digits[at] for at in positions)][digits]

    def match(self, key: Key) -> Iterator[tuple[str, dict[str, str]]]:
        """The names that match a key without array, each with the digits in its holes."""
        if not key.holes:
            name = "".join(map(str, key.pieces))
            if name in self._names:
                yield name, {}
            return
        skeleton, runs = _pattern(key)
        fixed = tuple(at for at, run in enumerate(runs) if run.hole is None)
        found = self._view(skeleton, fixed).get(tuple(runs[at].before for at in fixed), {})
        for digits, name in found.items():
            values = _values(runs, digits)
            if values is not None:
                yield name, values

    def _view(self, skeleton: Skeleton, positions: Positions) -> Mapping[Digits, Mapping[Digits, str]]:
        views = self._buckets.get(skeleton)
        if views is None:
            return {}
        if positions not in views:
            view: dict[Digits, dict[Digits, str]] = {}
            for digits, name in views[()].get((), {}).items():
                view.setdefault(tuple(digits[at] for at in positions), {})[digits] = name
            views[positions] = view
        return views[positions]


def _split(name: str) -> tuple[Skeleton, Digits]:
    parts = _RUN.split(name)
    return tuple(parts[::2]), tuple(parts[1::2])


def _pattern(key: Key) -> tuple[Skeleton, list[_Run]]:
    holes = iter(key.holes)
    parts = _HOLES_AND_DIGITS.split("".join("\0" if isinstance(piece, Hole) else piece for piece in key.pieces))
    runs = []
    for run in parts[1::2]:
        before, hole, after = run.partition("\0")
        runs.append(_Run(before, next(holes) if hole else None, after))
    return tuple(parts[::2]), runs


def _values(runs: Iterable[_Run], digits: Digits) -> dict[str, str] | None:
    """What the ids and the star are, or None where the digits do not fit; an id stands for one value."""
    values: dict[str, str] = {}
    for run, text in zip(runs, digits, strict=True):
        if run.hole is None:
            continue
        found = run.value(text)
        if found is not None and run.hole.offset:
            found = moved(found, -run.hole.offset)
        if found is None or values.setdefault(run.hole.name, found) != found:
            return None
    return values


def moved(digits: str, offset: int) -> str | None:
    """The number `offset` further on; None below zero, or where zeros in front would be lost."""
    if not offset:
        return digits
    number = int(digits) + offset
    return None if number < 0 or (len(digits) > 1 and digits[0] == "0") else str(number)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint that names those which `name` may be a misspelling of; empty if there is none."""
    close = (other for other in names if abs(len(other) - len(name)) <= 10)
    found = difflib.get_close_matches(name, list(itertools.islice(close, _NEAREST_AMONG)), 3, 0.6)
    return f"; near it: {', '.join(map(repr, found))}" if found else ""
