"""A ledger: living steps in a policy's order, kept across saves, so that removable steps are found without a scan.

`Policy.kept` visits every step. A ledger finds the removable steps by visiting only candidates.
It is updated with what has changed, and rebuilt when branches change.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from typing import TypeVar

from holdfast.checkpoint.catalog import Catalog, Committed, left_steps
from holdfast.checkpoint.lineage import LeftStep
from holdfast.core.names import step_folder
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
        self._rebuild()

    def _rebuild(self) -> None:
        """Start from all steps of the catalog."""
        self._entries: dict[str, Committed] = {}
        self._living: list[int] = []  # the living steps with a good manifest
        self._unpinned: list[int] = []  # the living steps that no `every` rule keeps
        self._ranks: list[list[tuple[float, int]]] = [[] for _ in self._best]
        found = self._catalog.steps
        self._lefts: Counter[tuple[LeftStep, ...]] = Counter(left for entry in found if (left := _left_by(entry)))
        self._left = {left for lefts in self._lefts for left in lefts}
        self._abandons = {left for entry in found if entry.manifest for left in entry.manifest.abandons}
        self.abandoned: dict[LeftStep, Committed] = {}
        for entry in found:
            self._add(entry)
        self._catalog.changed.clear()

    def update(self) -> None:
        """Apply the changes of the catalog."""
        changed = [(self._entries.get(folder), self._catalog.get(folder)) for folder in self._catalog.changed]
        steps = [(old, new) for old, new in changed if old is not new]
        if self._branches_change(steps):
            self._rebuild()
            return
        for old, new in steps:
            if old is not None:
                self._remove(old)
            if new is not None and new.is_step:
                self._add(new)
        self._catalog.changed.clear()

    def _branches_change(self, steps: list[tuple[Committed | None, Committed | None]]) -> bool:
        """Count manifests by the steps they left behind; return True if the set of keys changes."""
        before = set(self._lefts)
        for old, new in steps:
            if old is not None and (lefts := _left_by(old)):
                self._lefts[lefts] -= 1
                if not self._lefts[lefts]:
                    del self._lefts[lefts]
            if new is not None and new.is_step and (lefts := _left_by(new)):
                self._lefts[lefts] += 1
        return self._lefts.keys() != before

    def _add(self, entry: Committed) -> None:
        self._entries[entry.folder] = entry
        manifest = entry.manifest
        if manifest is None:
            return
        key = (entry.step, manifest.identity)
        if key in self._abandons:
            self.abandoned[key] = entry
        if key in self._left:
            return
        insort(self._living, entry.step)
        if not any(entry.step % steps == 0 for steps in self._every):
            insort(self._unpinned, entry.step)
        for ranks, rank in zip(self._ranks, self._ranked(entry), strict=True):
            if rank is not None:
                insort(ranks, rank)

    def _remove(self, entry: Committed) -> None:
        del self._entries[entry.folder]
        manifest = entry.manifest
        if manifest is None:
            return
        key = (entry.step, manifest.identity)
        self.abandoned.pop(key, None)
        if key in self._left:
            return
        _remove_sorted(self._living, entry.step)
        if not any(entry.step % steps == 0 for steps in self._every):
            _remove_sorted(self._unpinned, entry.step)
        for ranks, rank in zip(self._ranks, self._ranked(entry), strict=True):
            if rank is not None:
                _remove_sorted(ranks, rank)

    def _ranked(self, entry: Committed) -> Iterator[tuple[float, int] | None]:
        """Yield the position of a step in the order of each `best` rule; None without the rule's metric."""
        assert entry.manifest is not None
        for _, metric, mode in self._best:
            value = signed_metric(entry.manifest, metric, mode)
            yield None if value is None else (value, -entry.step)

    def removable(self, committed: int, now: datetime | None = None) -> list[Committed]:
        """Return the steps that no rule keeps, without the newest and the just committed one.

        Steps that leave others behind may still be needed: see `is_needed`.
        """
        if self.policy is None or any(not ranks for ranks in self._ranks):
            return []  # a metric that no step has judges nothing
        now = now or datetime.now(UTC)
        newest = self._living[-1] if self._living else None
        out = []
        for step in self._outdated():
            entry = self._entries[step_folder(step)]
            if step not in (newest, committed) and not self._is_kept(entry, now):
                out.append(entry)
        return out

    def _outdated(self) -> list[int]:
        """Return the steps kept neither by their number nor as one of the last."""
        if not self._last:
            return list(self._unpinned)
        if len(self._living) <= self._last:
            return []
        return self._unpinned[: bisect_left(self._unpinned, self._living[-self._last])]

    def _is_kept(self, entry: Committed, now: datetime) -> bool:
        assert entry.manifest is not None
        for (count, *_), ranks, rank in zip(self._best, self._ranks, self._ranked(entry), strict=True):
            if rank is not None and bisect_left(ranks, rank) < count:
                return True
        return self._newer_than is not None and is_newer_than(entry.manifest, now, self._newer_than)

    def decisive_folders(self, most: int) -> set[str]:
        """Return the folders whose change could change the removable steps, at most `most` per rule."""
        steps = {*self._living[-min(self._last, most) :]} if self._last else set()
        for (count, *_), ranks in zip(self._best, self._ranks, strict=True):
            steps |= {-step for _, step in ranks[: min(count, most)]}
        return {step_folder(step) for step in steps}

    def is_needed(self, entry: Committed) -> bool:
        """Return True if only this manifest leaves behind steps that still have their names."""
        lefts = _left_by(entry)
        if not lefts or self._lefts[lefts] > 1:
            return False
        there = {(e.step, e.manifest.identity) for e in self._entries.values() if e.manifest}
        others: Collection[Committed] = [e for e in self._entries.values() if e is not entry]
        return bool(there & set(lefts) - left_steps(others))


def _left_by(entry: Committed) -> tuple[LeftStep, ...]:
    """Return the steps that a manifest leaves behind."""
    return (*entry.manifest.abandons, *entry.manifest.skips) if entry.manifest is not None else ()


def _remove_sorted(ordered: list[_Sorted], item: _Sorted) -> None:
    """Remove an item that is in a sorted list."""
    del ordered[bisect_left(ordered, item)]
