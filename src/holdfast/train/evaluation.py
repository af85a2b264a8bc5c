"""Evaluation that gives one number whatever the layout: every sample counts once, also where ranks have too few."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from holdfast.train.batch import Batches
from holdfast.train.data.feed import Feed
from holdfast.train.loss import LossSums
from holdfast.train.model_replica import Trainee


class Evaluation:
    """The loss of a model over a dataset, in batches of the shape that it trains in. Collective."""

    def __init__(self, trainee: Trainee, feed: Feed, batches: Batches, samples: int) -> None:
        self._trainee = trainee
        self._feed = feed
        self._batches = batches
        self._samples = samples

    def run(self) -> LossSums:
        """Sums over all samples, the same on every rank."""
        total = LossSums(0.0, 0, 0.0, 0, self._trainee.config.router_aux_loss_coef)
        for shares in evaluation_shares(self._samples, self._batches, self._trainee.meshes.dp_rank):
            total += self._trainee.evaluate(self._feed.micro_batches(shares))
        return total


def evaluation_shares(samples: int, batches: Batches, data_rank: int) -> Iterator[list[NDArray[np.int64]]]:
    """This rank's samples of an evaluation, in rounds of one global batch; -1 where there is none left.

    Every rank has every round, of one shape: they compute together, though the last ones are filled up.
    """
    for first in range(0, samples, batches.global_batch):
        begin = first + data_rank * batches.rank_batch
        mine = np.arange(begin, begin + batches.rank_batch, dtype=np.int64)
        mine[mine >= samples] = -1
        yield [mine[at : at + batches.micro_batch] for at in range(0, len(mine), batches.micro_batch)]
