"""An index of names by pattern: match keys with holes without a scan; shifted digits; hints for misspelled names."""

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
class _DigitRun:
    """A run of digits of a pattern: literal digits, or a hole with optional digits around it."""

    before: str
    hole: Hole | None
    after: str

    def value(self, digits: str) -> str | None:
        """Return the digits in the hole, or None if the run does not match."""
        end = len(digits) - len(self.after)
        if end <= len(self.before) or not digits.startswith(self.before) or not digits.endswith(self.after):
            return None
        found = digits[len(self.before) : end]
        return found if len(found) <= _LONGEST_RUN else None


class NameIndex:
    """A set of names, grouped by their text without digits and by the digits that a pattern fixes."""

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
        """Yield the names that match a key without an array, each with the digits in its holes."""
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


def _pattern(key: Key) -> tuple[Skeleton, list[_DigitRun]]:
    holes = iter(key.holes)
    parts = _HOLES_AND_DIGITS.split("".join("\0" if isinstance(piece, Hole) else piece for piece in key.pieces))
    runs = []
    for run in parts[1::2]:
        before, hole, after = run.partition("\0")
        runs.append(_DigitRun(before, next(holes) if hole else None, after))
    return tuple(parts[::2]), runs


def _values(runs: Iterable[_DigitRun], digits: Digits) -> dict[str, str] | None:
    """Return the values of the ids and the star, or None if the digits do not match; each id has one value."""
    values: dict[str, str] = {}
    for run, text in zip(runs, digits, strict=True):
        if run.hole is None:
            continue
        found = run.value(text)
        if found is not None and run.hole.offset:
            found = shifted(found, -run.hole.offset)
        if found is None or values.setdefault(run.hole.name, found) != found:
            return None
    return values


def shifted(digits: str, offset: int) -> str | None:
    """Return the digits plus `offset`; None below zero, or if leading zeros would be lost."""
    if not offset:
        return digits
    number = int(digits) + offset
    return None if number < 0 or (len(digits) > 1 and digits[0] == "0") else str(number)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint with names that `name` may be a misspelling of; empty if there are none."""
    close = (other for other in names if abs(len(other) - len(name)) <= 10)
    found = difflib.get_close_matches(name, list(itertools.islice(close, _NEAREST_AMONG)), 3, 0.6)
    return f"; similar names: {', '.join(map(repr, found))}" if found else ""
