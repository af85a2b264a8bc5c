"""Which samples come next: a pure function of the seed and of how many samples were consumed.

`consumed_samples` counts over all ranks since the run began, and is the only position there is.
A batch is a range of it; a rank's share is a part of that range. So the number of data-parallel
ranks may change between any two steps, and no sample is repeated or skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.train.batch import Batches
from holdfast.train.data.shuffle import shuffled


def sample_indices(length: int, seed: int, first: int, count: int) -> NDArray[np.int64]:
    """The samples at the positions [first, first + count) of a run over a dataset of `length` samples.

    Epoch e is the positions [e x length, (e + 1) x length), shuffled by (seed, e). A batch that
    reaches over the end of an epoch takes its remaining samples from the beginning of the next.
    """
    if length < 1:
        raise InvalidArgument(f"a dataset of {length} samples: there must be one at least")
    positions = np.arange(first, first + count, dtype=np.int64)
    epochs, within = np.divmod(positions, length)
    out = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        out[chosen] = shuffled(within[chosen], length, seed, int(epoch))
    return out


class Position:
    """How far a run has come in its data: saved with it, and checked when it resumes.

    The same on every rank. Raises Mismatch when a checkpoint's position belongs to other data,
    another seed, or other lengths: the order would be another, and samples would repeat.
    """

    def __init__(self, length: int, seed: int, dataset: str) -> None:
        self.consumed_samples = 0
        self._length, self._seed = length, seed
        self._order = {"length": length, "seed": seed, "dataset": dataset}

    @property
    def epoch(self) -> int:
        """Whole passes over the dataset so far."""
        return self.consumed_samples // self._length

    def first(self, batches: Batches, data_rank: int) -> int:
        """The number, among all samples of the run, of this rank's first sample of the next global batch."""
        return self.consumed_samples + data_rank * batches.rank_batch

    def shares(self, batches: Batches, data_rank: int) -> list[NDArray[np.int64]]:
        """This data-parallel rank's samples of the next global batch, one array per micro batch."""
        first = self.first(batches, data_rank)
        mine = sample_indices(self._length, self._seed, first, batches.rank_batch)
        return [mine[begin : begin + batches.micro_batch] for begin in range(0, len(mine), batches.micro_batch)]

    def advance(self, batches: Batches) -> None:
        """Count the batch that was trained on."""
        self.consumed_samples += batches.global_batch

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.consumed_samples, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mine in self._order.items():
            if state.get(name) != mine:
                raise Mismatch(
                    f"the checkpoint's data has {name}={state.get(name)!r}, this run's has {mine!r}: its samples would "
                    'repeat or be skipped; give the run the same data, or leave the position out with ignore=["data"]'
                )
        consumed = state.get("consumed_samples")
        if isinstance(consumed, bool) or not isinstance(consumed, int) or consumed < 0:
            raise Mismatch(f"the checkpoint's consumed_samples is {consumed!r}, not a whole number")
        self.consumed_samples = consumed
