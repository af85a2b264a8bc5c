"""The order of a set's rows: shuffled by seed and epoch, all of them or, where rows come in groups, nearby groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.train.data.shuffle import shuffled

Rows = NDArray[np.int64]
_MOST_STORED = 1 << 16  # rows of a set whose order is kept in memory: to compute it anew takes longer than a read


def seed_of(seed: int, *words: object) -> int:
    """Return a seed of 64 bits for one use of a run's seed."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, (seed, *words))).encode())


@dataclass(frozen=True, slots=True)
class _EpochGroups:
    """The groups in the order of one epoch, divided into windows of neighbors."""

    first_rows: Rows  # the first row of each group
    ends: Rows  # the end of each group, in rows of this order
    windows: Rows  # the end of each window, in rows of this order


class RowOrder:
    """The row at any position of an endless run over a set.

    Epoch e covers the positions [e x length, (e + 1) x length), and has each row once. Rows that are read in groups
    (the row groups of parquet) are shuffled by group, and then within windows of neighboring groups that have at
    least `window_rows` together: a window is what a reader keeps in memory.
    """

    def __init__(self, length: int, seed: int, groups: Sequence[int] | None = None, window_rows: int = 100_000) -> None:
        self.length, self._seed = length, seed
        self._groups = None if groups is None else np.asarray(groups, dtype=np.int64)
        self._window_rows = window_rows
        self._epochs: dict[int, _EpochGroups] = {}
        self._whole: dict[int, Rows] = {}

    def rows(self, first: int, count: int) -> Rows:
        """Return the rows at the positions [first, first + count)."""
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def at(self, positions: Rows) -> Rows:
        """Return the rows at these positions."""
        epochs, within = np.divmod(positions, self.length)
        out = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            out[chosen] = self._of_epoch(within[chosen], epoch)
        return out

    def _of_epoch(self, within: Rows, epoch: int) -> Rows:
        if self.length > _MOST_STORED:
            return self._shuffled(within, epoch)
        if epoch not in self._whole:
            self._whole = {old: self._whole[old] for old in self._whole if old == epoch - 1}
            self._whole[epoch] = self._shuffled(np.arange(self.length, dtype=np.int64), epoch)
        return self._whole[epoch][within]

    def _shuffled(self, within: Rows, epoch: int) -> Rows:
        if self._groups is None:
            return shuffled(within, self.length, self._seed, epoch)
        order = self._ordered_groups(epoch)
        window_of = np.searchsorted(order.windows, within, side="right")
        places = np.empty_like(within)
        for window in np.unique(window_of).tolist():
            begin = int(order.windows[window - 1]) if window else 0
            size, chosen = int(order.windows[window]) - begin, window_of == window
            places[chosen] = begin + shuffled(within[chosen] - begin, size, seed_of(self._seed, window), epoch)
        group = np.searchsorted(order.ends, places, side="right")
        begins = np.concatenate(([0], order.ends[:-1]))
        return np.asarray(order.first_rows[group] + places - begins[group], dtype=np.int64)

    def _ordered_groups(self, epoch: int) -> _EpochGroups:
        if epoch not in self._epochs:
            assert self._groups is not None
            order = shuffled(np.arange(len(self._groups)), len(self._groups), self._seed, epoch)
            sizes = self._groups[order]
            first_rows = (np.cumsum(self._groups) - self._groups)[order]
            ends = np.cumsum(sizes)
            self._epochs = {old: self._epochs[old] for old in self._epochs if old == epoch - 1}
            self._epochs[epoch] = _EpochGroups(first_rows, ends, _window_ends(ends, self._window_rows))
        return self._epochs[epoch]


def _window_ends(ends: Rows, window_rows: int) -> Rows:
    """Return the ends of windows, each with groups of at least `window_rows` rows together; the last with the rest."""
    found = [0]
    for end in ends.tolist():
        if end - found[-1] >= window_rows:
            found.append(end)
    if found[-1] < int(ends[-1]):
        found.append(int(ends[-1]))
    return np.asarray(found[1:], dtype=np.int64)
