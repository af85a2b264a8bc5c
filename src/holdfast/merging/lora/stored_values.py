"""Whole stored tensors, read a band of rows at a time: compared with each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from holdfast.convert.computed import ComputedTensors, rows_per_band
from holdfast.layout.box import Box
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe


def is_equal(first: Recipe[Place], second: Recipe[Place], computed: ComputedTensors) -> bool:
    """Return True if two tensors have the same shape, dtype and bits."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return all(
        computed.read(first, box).tobytes() == computed.read(second, box).tobytes() for box in bands(first.shape)
    )


def bands(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes of bands of rows that cover a tensor."""
    if not shape:
        yield Box((), ())
        return
    step = rows_per_band(math.prod(shape[1:]))
    for begin in range(0, shape[0], step):
        yield Box((begin, *(0,) * (len(shape) - 1)), (min(step, shape[0] - begin), *shape[1:]))
