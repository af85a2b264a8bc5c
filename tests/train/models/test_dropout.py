"""Dropout by hash: the right share, scaled, independent of everything but its own coordinates, and cut as ranks cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from holdfast.train.models.dropout import Dropout, Grid, attention_grid, dropout_mask, feature_grid, sample_keys

SAMPLES, LENGTH, FEATURES = 16, 64, 256
KEYS = [4172476758209173482, -6074629935774582655]
BITS = "10000001000111101110000100110100"


def grid(seed: int = 1, step: int = 2, first: int = 0) -> Grid:
    return feature_grid(sample_keys(seed, step, first, SAMPLES), 0, LENGTH, FEATURES)


def mask(rate: float = 0.5, place: str = "here", **where: int) -> torch.Tensor:
    return dropout_mask(grid(**where), rate, place)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """In standard deviations of what independent masks have."""
    a, b = one.double() - one.double().mean(), other.double() - other.double().mean()
    return float((a * b).mean() / (a.std() * b.std())) * one.numel() ** 0.5


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.9])
def test_the_share_is_right_in_all_and_along_each_dim(rate: float):
    found = mask(rate).double()
    for over in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        shares = found.mean(over)
        spread = (rate * (1 - rate) * shares.numel() / found.numel()) ** 0.5
        assert float((shares - rate).abs().max()) < 5.5 * spread, over


def test_shares_vary_as_much_as_chance_has_it():
    """A hash that is too regular gives every row and every column the same count."""
    found = mask(0.3).double()
    for over in ((1, 2), (0, 2), (0, 1), (2,), (0,)):
        shares = found.mean(over)
        expected = (0.3 * 0.7 * shares.numel() / found.numel()) ** 0.5
        few = 4 / shares.numel() ** 0.5
        assert float(shares.std()) == pytest.approx(expected, rel=max(few, 0.1)), over


def test_what_is_kept_grows_by_what_is_lost():
    x = torch.randn(SAMPLES, LENGTH, FEATURES, requires_grad=True)
    out = Dropout(0.2, "here")(x, grid())
    gone = mask(0.2)
    assert not out[gone].any()
    torch.testing.assert_close(out[~gone], x[~gone] / 0.8)
    out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (~gone) / 0.8)


def test_without_a_grid_or_a_rate_the_input_itself_comes_back():
    x = torch.randn(2, 3)
    assert Dropout(0.5, "here")(x, None) is x
    assert Dropout(0.0, "here")(x, grid()) is x


def test_masks_of_other_coordinates_have_nothing_to_do_with_each_other():
    masks = {
        "itself": mask(),
        "another place": mask(place="there"),
        "another step": mask(step=3),
        "another seed": mask(seed=3),
        "other samples": mask(first=SAMPLES),
        "the next step's seed": mask(seed=2, step=1),
    }
    for one, other in itertools.combinations(masks, 2):
        assert abs(correlation(masks[one], masks[other])) < 5, f"{one}, {other}"
    assert torch.equal(mask(), masks["itself"])


def test_neighbours_have_nothing_to_do_with_each_other():
    found = mask()
    for dim in range(3):
        for by in (1, 2, 3, 8):
            near = found.narrow(dim, by, found.shape[dim] - by)
            assert abs(correlation(near, found.narrow(dim, 0, near.shape[dim]))) < 5, (dim, by)


def test_four_corners_have_nothing_to_do_with_each_other():
    """Of rows and columns that are added or multiplied, the fourth follows from three."""
    found = mask()
    for rows, columns in ((1, 1), (2, 4), (8, 16)):
        unlike = found[:, :-rows] ^ found[:, rows:]
        assert abs(correlation(unlike[..., :-columns], unlike[..., columns:])) < 5, (rows, columns)


def test_a_sample_is_the_same_in_every_batch_and_a_part_of_it_in_every_slice():
    whole = mask(0.1)
    later = mask(0.1, first=5)
    assert torch.equal(later[:-5], whole[5:])
    keys = sample_keys(1, 2, 0, SAMPLES)
    for rank in range(4):
        part = feature_grid(keys, rank * 16, 16, FEATURES)
        assert torch.equal(dropout_mask(part, 0.1, "here"), whole[:, rank * 16 : (rank + 1) * 16])


def test_heads_too_and_they_share_nothing_with_features():
    keys = sample_keys(1, 2, 0, 4)
    whole = dropout_mask(attention_grid(keys, 0, 8, LENGTH), 0.5, "here")
    assert whole.shape == (4, 8, LENGTH, LENGTH)
    assert float(whole.double().mean()) == pytest.approx(0.5, abs=0.01)
    assert torch.equal(dropout_mask(attention_grid(keys, 6, 2, LENGTH), 0.5, "here"), whole[:, 6:])
    features = dropout_mask(feature_grid(keys, 0, LENGTH, LENGTH), 0.5, "here")
    for head in range(8):
        assert abs(correlation(whole[:, head], features)) < 5
        assert abs(correlation(whole[:, head], whole[:, (head + 1) % 8])) < 5


def test_the_numbers_stay_what_they_are():
    """A resumed run goes on with the masks of the run before it, also of an older version of this file."""
    keys = sample_keys(7, 3, 2**33, 2)
    assert keys.tolist() == KEYS
    gone = dropout_mask(feature_grid(keys, 5, 2, 8), 0.5, "layers/0/after mlp")
    assert "".join("01"[bit] for bit in gone.flatten().tolist()) == BITS


@pytest.mark.parametrize("make", [feature_grid, attention_grid])
def test_drawing_disturbs_no_generator(make: Callable[..., Grid]):
    before = torch.get_rng_state()
    dropout_mask(make(sample_keys(1, 1, 0, 2), 0, 4, 8), 0.5, "here")
    assert torch.equal(torch.get_rng_state(), before)
