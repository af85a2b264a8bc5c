from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout.box import Box
from holdfast.layout.flat import flat_boxes


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
