"""The order of samples by seed and consumed samples, and a run's position in its data, saved and resumed.

`consumed_samples` counts over all ranks since the run began, and is the only position. A batch is a
range of positions, and each rank reads part of that range. So the number of data-parallel ranks may
change between any two steps without repeating or skipping a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.train.batch import BatchSizes
from holdfast.train.data.shuffle import shuffled


def sample_indices(length: int, seed: int, first: int, count: int) -> NDArray[np.int64]:
    """Return the samples at positions [first, first + count) of a run over a dataset of `length` samples.

    Epoch e covers the positions [e x length, (e + 1) x length), shuffled by (seed, e). A batch may span
    the end of one epoch and the beginning of the next.
    """
    if length < 1:
        raise InvalidArgument(f"a dataset of {length} samples: at least one sample is needed")
    positions = np.arange(first, first + count, dtype=np.int64)
    epochs, within = np.divmod(positions, length)
    out = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        out[chosen] = shuffled(within[chosen], length, seed, int(epoch))
    return out


class Position:
    """The position of a run in its data: saved with the run, and checked when it resumes.

    The same on every rank. Raises Mismatch if a checkpoint's position belongs to a different dataset,
    seed or length: samples would be repeated or skipped.
    """

    def __init__(self, length: int, seed: int, dataset: str) -> None:
        self.consumed_samples = 0
        self._length, self._seed = length, seed
        self._order = {"length": length, "seed": seed, "dataset": dataset}

    @property
    def epoch(self) -> int:
        """The number of complete passes over the dataset."""
        return self.consumed_samples // self._length

    def first(self, batches: BatchSizes, data_rank: int) -> int:
        """Return the position of this rank's first sample in the next global batch."""
        return self.consumed_samples + data_rank * batches.rank_batch

    def shares(self, batches: BatchSizes, data_rank: int) -> list[NDArray[np.int64]]:
        """Return this data-parallel rank's samples of the next global batch, one array per micro batch."""
        first = self.first(batches, data_rank)
        mine = sample_indices(self._length, self._seed, first, batches.rank_batch)
        return [mine[begin : begin + batches.micro_batch] for begin in range(0, len(mine), batches.micro_batch)]

    def advance(self, batches: BatchSizes) -> None:
        """Advance past the global batch just trained on."""
        self.consumed_samples += batches.global_batch

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.consumed_samples, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mine in self._order.items():
            if state.get(name) != mine:
                raise Mismatch(
                    f"the checkpoint's data has {name}={state.get(name)!r}, but this run's has {mine!r}: samples would "
                    'be repeated or skipped; use the same data, or exclude the position with ignore=["data"]'
                )
        consumed = state.get("consumed_samples")
        if isinstance(consumed, bool) or not isinstance(consumed, int) or consumed < 0:
            raise Mismatch(f"the checkpoint's consumed_samples is {consumed!r}, not an integer of at least 0")
        self.consumed_samples = consumed
