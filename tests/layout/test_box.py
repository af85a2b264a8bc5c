"""Boxes and flat ranges, against numpy's own slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout.box import Box, flat_boxes


def boxes(dims: int) -> st.SearchStrategy[Box]:
    sizes = st.lists(st.integers(1, 6), min_size=dims, max_size=dims)
    return st.builds(lambda o, n: Box(tuple(o), tuple(n)), sizes, sizes)


@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims))))
def test_intersection_is_what_numpy_marks_twice(pair: tuple[Box, Box]) -> None:
    a, b = pair
    grid = np.zeros((13,) * len(a.sizes), dtype=int)
    whole = Box.full(grid.shape)
    grid[a.within(whole)] += 1
    grid[b.within(whole)] += 1
    common = a.intersect(b)
    assert common == b.intersect(a)
    assert int((grid == 2).sum()) == (common.volume if common else 0)
    if common:
        assert (grid[common.within(whole)] == 2).all()
        assert a.contains(common) and b.contains(common)


@given(st.data())
def test_contiguity_is_what_numpy_says(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    box = Box(offsets, sizes)
    numbers = np.arange(np.prod(shape)).reshape(shape)[box.within(Box.full(shape))].reshape(-1)
    assert box.is_contiguous_in(shape) == bool((np.diff(numbers) == 1).all())
    assert box.flat_offset(shape) == numbers[0]


@given(st.data())
def test_flat_ranges_are_runs_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    total = int(np.prod(shape))
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = flat_boxes(shape, start, stop)
    numbers = np.arange(total).reshape(shape)
    runs = [numbers[box.within(Box.full(shape))].reshape(-1) for box in found]
    assert np.array_equal(np.concatenate([np.empty(0, dtype=int), *runs]), np.arange(start, stop))
    assert all(box.is_contiguous_in(shape) for box in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_range_outside_the_tensor_is_refused() -> None:
    for start, stop in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="is not inside a tensor of 6 elements"):
            flat_boxes((2, 3), start, stop)
