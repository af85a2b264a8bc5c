"""Whether chunks fill a tensor: quick for many, and right for any."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.layout.box import Box
from holdfast.sources.dcp.chunks import fills
from tests.effort import at_most


def grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    edges = [sorted({0, size, *(cut % (size + 1) for cut in own)}) for size, own in zip(shape, cuts, strict=True)]
    spans = [list(itertools.pairwise(own)) if len(own) > 1 else [(0, 0)] for own in edges]
    return [Box(tuple(a for a, _ in c), tuple(b - a for a, b in c)) for c in itertools.product(*spans)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_grid_fills_and_a_changed_one_does_not(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = grid(shape, [data.draw(st.lists(st.integers(0, 6), max_size=3)) for _ in shape])
    assert fills(data.draw(st.permutations(boxes)), shape)
    at = data.draw(st.integers(0, len(boxes) - 1))
    assert not fills(boxes[:at] + boxes[at + 1 :], shape)
    assert not fills([*boxes, boxes[at]], shape)
    moved = data.draw(st.lists(st.sampled_from(boxes), min_size=len(boxes), max_size=len(boxes)))
    assert fills(moved, shape) == _by_count(moved, shape)


def _by_count(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    seen = np.zeros(shape, int)
    for box in boxes:
        seen[box.within(Box.full(shape))] += 1
    return bool((seen == 1).all())


def test_tensors_without_dims_or_elements():
    assert fills([Box((), ())], ())
    assert not fills([], ())
    assert not fills([Box((), ()), Box((), ())], ())
    assert fills([], (0, 3)) and fills([Box((0, 0), (0, 3))], (0, 3))


def test_thousands_of_chunks_take_no_time():
    for dim in (0, 1):
        shape = (8192, 4) if dim == 0 else (4, 8192)
        sizes = (1, 4) if dim == 0 else (4, 1)
        boxes = [Box((n, 0) if dim == 0 else (0, n), sizes) for n in range(8192)]
        with at_most(1):
            assert fills(boxes, shape)
