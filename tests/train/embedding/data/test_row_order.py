"""Every row once per epoch, in another order each time; grouped rows stay near each other."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.train.data.samples import sample_indices
from holdfast.train.embedding.data.row_order import RowOrder

GROUPS = (7, 1, 12, 5, 5, 30, 2, 9, 9, 20)


@pytest.mark.parametrize("groups", [None, GROUPS, (100,)], ids=str)
@pytest.mark.parametrize("window", [1, 25, 1000])
def test_every_row_once_per_epoch(groups, window: int):
    order = RowOrder(100, 7, groups, window)
    epochs = [order.rows(100 * epoch, 100).tolist() for epoch in range(6)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert list(range(100)) not in epochs


def test_without_groups_it_is_the_order_of_text_data():
    assert np.array_equal(RowOrder(37, 5).rows(20, 200), sample_indices(37, 5, 20, 200))


def test_positions_in_any_order_and_of_several_epochs():
    order = RowOrder(100, 7, GROUPS, 25)
    whole = order.rows(0, 700)
    positions = np.random.default_rng(0).permutation(700)
    assert np.array_equal(order.at(positions), whole[positions])
    assert len(order.at(np.array([], dtype=np.int64))) == 0


def test_a_window_has_few_groups_and_groups_are_mixed_in_it():
    """Of 100 groups of 10 rows a window of 50 rows has 5, with rows of all of them in the first half."""
    groups = np.repeat(np.arange(100), 10)
    rows = RowOrder(1000, 3, [10] * 100, 50).rows(0, 1000)
    windows = groups[rows].reshape(20, 50)
    assert [len(set(window)) for window in windows] == [5] * 20
    assert sum(len(set(window[:25])) for window in windows) > 95
    assert len({tuple(sorted(set(window))) for window in windows}) == 20
