"""Sets come in proportion to their weights, evenly, from any batch on."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast
from holdfast.train.embedding.data.mixture import Mixture


@pytest.mark.parametrize("weights", [[1.0], [1, 1], [5, 1], [1e-2, 1, 3], [2, 3, 5, 7, 11, 13], [1e9, 1e9]], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_shares_at_every_batch(weights, seed: int):
    sets = Mixture(weights, seed).sets(0, 5000)
    shares = np.array(weights) / sum(weights)
    counts = np.cumsum(sets[:, None] == np.arange(len(weights)), axis=0)
    expected = np.arange(1, 5001)[:, None] * shares
    assert np.abs(counts - expected).max() < 4  # drawn at random: about 35


def test_any_range_of_batches_and_seeds():
    whole = Mixture([1, 2, 3], 1).sets(0, 100)
    assert np.array_equal(Mixture([1, 2, 3], 1).sets(37, 63), whole[37:])
    assert not np.array_equal(Mixture([1, 2, 3], 2).sets(0, 100), whole)


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), True])
def test_weights_that_make_no_sense(weight):
    with pytest.raises(holdfast.InvalidArgument, match="above 0"):
        Mixture([1, weight], 1)
