"""Every sample once per epoch, whatever the number of ranks, and however often it changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import holdfast
from holdfast.train.batch import BatchSizes, derive_batches
from holdfast.train.data.samples import Position, sample_indices
from holdfast.train.data.shuffle import shuffled


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_an_order_has_every_sample_once(length: int):
    order = shuffled(np.arange(length), length, seed=7, epoch=3)
    assert sorted(order) == list(range(length))


def test_orders_differ_by_seed_and_epoch_and_are_shuffled():
    orders = {tuple(shuffled(np.arange(200), 200, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(range(200)) not in orders


def test_positions_go_everywhere():
    """The sample at a position is spread evenly over seeds: chi-square over 10 bins, far from its bounds."""
    found = [int(shuffled([17], 1000, seed, 0)[0]) // 100 for seed in range(2000)]
    expected = 200
    chi_square = sum((count - expected) ** 2 / expected for count in Counter(found).values())
    assert len(Counter(found)) == 10
    assert chi_square < 27.9  # 9 degrees of freedom, 0.1%


def test_neighbours_do_not_stay_neighbours():
    order = shuffled(np.arange(10_000), 10_000, seed=1, epoch=0)
    assert (np.abs(np.diff(order)) == 1).mean() < 0.001
    places = np.arange(10_000)
    kept = [np.corrcoef(places, shuffled(places, 10_000, seed, 0))[0, 1] for seed in range(60)]
    assert 0.007 < np.std(kept) < 0.013, "as far from 0 as chance makes it: 1 / sqrt(10,000)"


def test_a_range_does_not_depend_on_how_it_is_asked_for():
    whole = sample_indices(100, 5, 0, 350)
    parts = np.concatenate([sample_indices(100, 5, first, 7) for first in range(0, 350, 7)])
    assert np.array_equal(whole, parts)


def _train(position: Position, batches: BatchSizes, steps: int) -> list[int]:
    seen: list[int] = []
    for _ in range(steps):
        for rank in range(batches.data_parallel):
            shares = position.shares(batches, rank)
            assert len(shares) == batches.accumulation
            assert all(len(share) == batches.micro_batch for share in shares)
            seen += [int(index) for share in shares for index in share]
        position.advance(batches)
    return seen


def test_the_number_of_ranks_changes_in_the_middle_of_an_epoch():
    """1,000 samples, data-parallel size 2 -> 4 -> 3 -> 1, resumed from a saved value each time, over three epochs.

    A global batch of 24 does not divide an epoch of 1,000: the last one reaches into the next.
    """
    seen: list[int] = []
    state = None
    for world, steps in [(2, 10), (4, 7), (3, 13), (1, 11), (2, 12), (4, 30), (3, 42)]:
        position = Position(1000, seed=11, dataset="d")
        if state is not None:
            position.load_state_dict(state)
        seen += _train(position, derive_batches(global_batch=24, micro_batch=2, data_parallel=world), steps)
        state = position.state_dict()
    assert len(seen) == 125 * 24 == 3000
    for epoch in range(3):
        assert sorted(seen[epoch * 1000 : epoch * 1000 + 1000]) == list(range(1000))
    assert seen == [int(index) for index in sample_indices(1000, 11, 0, 3000)], (
        "the order of the layout that never changed"
    )


def test_epochs_are_counted():
    position = Position(10, seed=0, dataset="d")
    batches = derive_batches(global_batch=4, micro_batch=1, data_parallel=1)
    epochs = []
    for _ in range(6):
        epochs.append(position.epoch)
        position.advance(batches)
    assert epochs == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(("name", "other"), [("length", 11), ("seed", 2), ("dataset", "e")])
def test_a_position_of_other_data_is_refused(name: str, other: object):
    saved = Position(10, seed=1, dataset="d").state_dict() | {name: other}
    with pytest.raises(holdfast.Mismatch, match=name):
        Position(10, seed=1, dataset="d").load_state_dict(saved)


@pytest.mark.parametrize("consumed", [-1, 1.5, None, True, "3"])
def test_a_position_that_is_none_is_refused(consumed: object):
    saved = Position(10, seed=1, dataset="d").state_dict() | {"consumed_samples": consumed}
    with pytest.raises(holdfast.Mismatch, match="consumed_samples"):
        Position(10, seed=1, dataset="d").load_state_dict(saved)
