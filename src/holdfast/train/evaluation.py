"""Evaluation independent of the layout: every sample counts once, padding where some ranks have fewer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from holdfast.train.batch import BatchSizes
from holdfast.train.data.feed import Feed
from holdfast.train.loss import LossSums
from holdfast.train.parallel.model_replica import ModelReplica


class Evaluation:
    """The loss of a model over a dataset, in batches of the training shape. Collective."""

    def __init__(self, replica: ModelReplica, feed: Feed, batches: BatchSizes, samples: int) -> None:
        self._replica = replica
        self._feed = feed
        self._batches = batches
        self._samples = samples

    def run(self) -> LossSums:
        """Return the sums over all samples, the same on every rank."""
        total = LossSums(0.0, 0, 0.0, 0, self._replica.config.router_aux_loss_coef)
        for shares in evaluation_shares(self._samples, self._batches, self._replica.meshes.dp_rank):
            total += self._replica.evaluate(self._feed.micro_batches(shares))
        return total


def evaluation_shares(samples: int, batches: BatchSizes, data_rank: int) -> Iterator[list[NDArray[np.int64]]]:
    """Yield this rank's evaluation samples, one global batch at a time, padded with -1.

    Every rank yields equally many batches of one shape, because the forward pass is collective.
    """
    for first in range(0, samples, batches.global_batch):
        begin = first + data_rank * batches.rank_batch
        mine = np.arange(begin, begin + batches.rank_batch, dtype=np.int64)
        mine[mine >= samples] = -1
        yield [mine[at : at + batches.micro_batch] for at in range(0, len(mine), batches.micro_batch)]
