"""Whole stored tensors, read a band of rows at a time: compared with each other, searched for NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

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


def not_finite(recipe: Recipe[Place], computed: ComputedTensors) -> int:
    """Return how many elements of a floating-point tensor are NaN or infinite."""
    dtype = getattr(torch, recipe.dtype.name, None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return 0
    values = (torch.from_numpy(computed.read(recipe, box)).view(dtype) for box in bands(recipe.shape))
    return sum(value.numel() - int(value.isfinite().sum()) for value in values)


def bands(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes of bands of rows that cover a tensor."""
    if not shape:
        yield Box((), ())
        return
    step = rows_per_band(math.prod(shape[1:]))
    for begin in range(0, shape[0], step):
        yield Box((begin, *(0,) * (len(shape) - 1)), (min(step, shape[0] - begin), *shape[1:]))
