"""A ledger: the living steps in the order a policy judges them, kept from save to save.

`Policy.kept` looks at every step. A ledger answers which steps go by looking at those that may:
it is updated by what has changed, and made anew when branches change.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from typing import TypeVar

from holdfast.checkpoint.catalog import Catalog, Committed, steps_left
from holdfast.checkpoint.lineage import Left
from holdfast.format.names import step_folder
from holdfast.keep import Policy, is_newer_than, signed_metric

_Sorted = TypeVar("_Sorted", int, tuple[float, int])


class Ledger:
    """The steps of one catalog, judged by one policy."""

    def __init__(self, catalog: Catalog, policy: Policy | None) -> None:
        self._catalog = catalog
        self.policy = policy
        rules = policy.rules if policy is not None else ()
        self._last = max((arguments[0] for name, arguments in rules if name == "last"), default=0)
        self._every = [arguments[0] for name, arguments in rules if name == "every"]
        self._best = [arguments for name, arguments in rules if name == "best"]
        self._newer_than = max((arguments[0] for name, arguments in rules if name == "newer_than"), default=None)
        self._make()

    def _make(self) -> None:
        """Start from all steps of the catalog."""
        self._entries: dict[str, Committed] = {}
        self._living: list[int] = []  # the good ones
        self._loose: list[int] = []  # those of them that no rule keeps for their number
        self._ranks: list[list[tuple[float, int]]] = [[] for _ in self._best]
        found = self._catalog.steps
        self._lefts: Counter[tuple[Left, ...]] = Counter(left for entry in found if (left := _lefts(entry)))
        self._left = {left for lefts in self._lefts for left in lefts}
        self._abandons = {left for entry in found if entry.manifest for left in entry.manifest.abandons}
        self.abandoned: dict[Left, Committed] = {}
        for entry in found:
            self._add(entry)
        self._catalog.changed.clear()

    def update(self) -> None:
        """Take over what has changed in the catalog."""
        changed = [(self._entries.get(folder), self._catalog.get(folder)) for folder in self._catalog.changed]
        steps = [(old, new) for old, new in changed if old is not new]
        if self._branches_change(steps):
            self._make()
            return
        for old, new in steps:
            if old is not None:
                self._remove(old)
            if new is not None and new.is_step:
                self._add(new)
        self._catalog.changed.clear()

    def _branches_change(self, steps: list[tuple[Committed | None, Committed | None]]) -> bool:
        """Count who gives up what; returns whether some step may be given up, or given back, by these changes."""
        before = set(self._lefts)
        for old, new in steps:
            if old is not None and (lefts := _lefts(old)):
                self._lefts[lefts] -= 1
                if not self._lefts[lefts]:
                    del self._lefts[lefts]
            if new is not None and new.is_step and (lefts := _lefts(new)):
                self._lefts[lefts] += 1
        return self._lefts.keys() != before

    def _add(self, entry: Committed) -> None:
        self._entries[entry.folder] = entry
        manifest = entry.manifest
        if manifest is None:
            return
        key = (entry.step, manifest.attempt)
        if key in self._abandons:
            self.abandoned[key] = entry
        if key in self._left:
            return
        insort(self._living, entry.step)
        if not any(entry.step % steps == 0 for steps in self._every):
            insort(self._loose, entry.step)
        for ranks, rank in zip(self._ranks, self._ranked(entry), strict=True):
            if rank is not None:
                insort(ranks, rank)

    def _remove(self, entry: Committed) -> None:
        del self._entries[entry.folder]
        manifest = entry.manifest
        if manifest is None:
            return
        key = (entry.step, manifest.attempt)
        self.abandoned.pop(key, None)
        if key in self._left:
            return
        _take(self._living, entry.step)
        if not any(entry.step % steps == 0 for steps in self._every):
            _take(self._loose, entry.step)
        for ranks, rank in zip(self._ranks, self._ranked(entry), strict=True):
            if rank is not None:
                _take(ranks, rank)

    def _ranked(self, entry: Committed) -> Iterator[tuple[float, int] | None]:
        """The places of a step in the orders of the `best` rules; None in one whose metric it does not have."""
        assert entry.manifest is not None
        for _, metric, mode in self._best:
            value = signed_metric(entry.manifest, metric, mode)
            yield None if value is None else (value, -entry.step)

    def going(self, committed: int, now: datetime | None = None) -> list[Committed]:
        """The steps that no rule keeps; neither the newest nor the one that was just committed.

        Of a step that gives up others it is left open whether it is needed for that.
        """
        if self.policy is None or any(not ranks for ranks in self._ranks):
            return []  # a metric that no step has judges none
        now = now or datetime.now(UTC)
        newest = self._living[-1] if self._living else None
        out = []
        for step in self._outdated():
            entry = self._entries[step_folder(step)]
            if step not in (newest, committed) and not self._is_kept(entry, now):
                out.append(entry)
        return out

    def _outdated(self) -> list[int]:
        """The steps that neither their number nor their place among the last ones keeps."""
        if not self._last:
            return list(self._loose)
        if len(self._living) <= self._last:
            return []
        return self._loose[: bisect_left(self._loose, self._living[-self._last])]

    def _is_kept(self, entry: Committed, now: datetime) -> bool:
        assert entry.manifest is not None
        for (count, *_), ranks, rank in zip(self._best, self._ranks, self._ranked(entry), strict=True):
            if rank is not None and bisect_left(ranks, rank) < count:
                return True
        return self._newer_than is not None and is_newer_than(entry.manifest, now, self._newer_than)

    def deciding(self, most: int) -> set[str]:
        """The folders whose change could change what goes, at most about so many of each kind."""
        steps = {*self._living[-min(self._last, most) :]} if self._last else set()
        for (count, *_), ranks in zip(self._best, self._ranks, strict=True):
            steps |= {-step for _, step in ranks[: min(count, most)]}
        return {step_folder(step) for step in steps}

    def is_needed(self, entry: Committed) -> bool:
        """Whether steps that a manifest gives up are still there under their names, and no other manifest says so."""
        lefts = _lefts(entry)
        if not lefts or self._lefts[lefts] > 1:
            return False
        there = {(e.step, e.manifest.attempt) for e in self._entries.values() if e.manifest}
        others: Collection[Committed] = [e for e in self._entries.values() if e is not entry]
        return bool(there & set(lefts) - steps_left(others))


def _lefts(entry: Committed) -> tuple[Left, ...]:
    """The steps that a manifest gives up."""
    return (*entry.manifest.abandons, *entry.manifest.skips) if entry.manifest is not None else ()


def _take(ordered: list[_Sorted], item: _Sorted) -> None:
    """Remove an item from a sorted list that has it."""
    del ordered[bisect_left(ordered, item)]
