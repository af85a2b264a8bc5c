"""Reshape of recipes: dims are split into common factors, and adjacent factors are merged; the number of boxes.

A tensor [6, 4] becomes [2, 3, 2, 2] by splitting 6 into 2 x 3 and 4 into 2 x 2. Merging reverses this.
Both work like stack and unstack, so that a recipe stays a list of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from holdfast.plan.recipe import Recipe

S = TypeVar("S")
Shape = tuple[int, ...]


class ReshapeError(Exception):
    """One shape cannot be reshaped to the other; the message says why."""


def reshaped(recipe: Recipe[S], shape: Shape) -> Recipe[S]:
    """Return the same elements in row-major order with another shape. Raises ReshapeError."""
    if recipe.shape == shape:
        return recipe
    factors = _factors(recipe.shape, shape)
    if factors is None:
        return reshaped(reshaped(recipe, (math.prod(shape),)), shape)
    for dim in reversed([dim for dim, size in enumerate(recipe.shape) if size == 1]):
        recipe = recipe.squeezed(dim)
    at = 0
    for size in recipe.shape:
        for factor in _leading_factors(factors[at:], size)[:-1]:
            recipe = _split_dim(recipe, at, factor)
            at += 1
        at += 1
    for dim, size in enumerate([size for size in shape if size != 1]):
        for _ in _leading_factors(recipe.shape[dim:], size)[:-1]:
            recipe = _merge_dims(recipe, dim)
    for dim in (dim for dim, size in enumerate(shape) if size == 1):
        recipe = recipe.unsqueezed(dim)
    return recipe


def box_count(source: Shape, target: Shape) -> int:
    """Return the number of boxes that a whole tensor is split into. Raises ReshapeError."""
    if source == target:
        return 1
    factors = _factors(source, target)
    if factors is None:
        flat = (math.prod(source),)
        return box_count(source, flat) * box_count(flat, target)
    whole = _innermost(factors, source) & _innermost(factors, target)
    return math.prod(factor for at, factor in enumerate(factors) if at not in whole)


def _factors(source: Shape, target: Shape) -> list[int] | None:
    """Return the coarsest dims that both shapes are products of, without size 1; None if there are none.

    [6, 4] and [4, 6] have none, because their rows overlap; they are reshaped through a single dim.
    """
    if math.prod(source) != math.prod(target):
        raise ReshapeError(f"{math.prod(source)} elements do not fill {math.prod(target)}")
    if not math.prod(source):
        raise ReshapeError("the tensor is empty")
    ends = sorted({*_products(source), *_products(target)})
    factors: list[int] = []
    for small, large in zip((1, *ends), ends, strict=False):
        if large % small:
            return None
        factors.append(large // small)
    return [factor for factor in reversed(factors) if factor != 1]


def _innermost(factors: Sequence[int], shape: Shape) -> set[int]:
    """Return the positions of the last factor of each dim; only these can stay whole in a box."""
    found, at = set(), 0
    for size in (size for size in shape if size != 1):
        at += len(_leading_factors(factors[at:], size))
        found.add(at - 1)
    return found


def _products(shape: Shape) -> list[int]:
    """Return the products of the last dim, the last two dims and so on."""
    out, product = [], 1
    for size in reversed(shape):
        product *= size
        out.append(product)
    return out


def _leading_factors(factors: Sequence[int], size: int) -> list[int]:
    """Return the leading factors whose product is `size`."""
    out: list[int] = []
    product = 1
    for factor in factors:
        if product == size:
            break
        out.append(factor)
        product *= factor
    return out


def _split_dim(recipe: Recipe[S], dim: int, count: int) -> Recipe[S]:
    """Split a dim into `count` times its remainder."""
    size = recipe.shape[dim] // count
    return Recipe.concat([part.unsqueezed(dim) for part in recipe.split(dim, (size,) * count)], dim)


def _merge_dims(recipe: Recipe[S], dim: int) -> Recipe[S]:
    """Merge a dim with the next one."""
    parts = recipe.split(dim, (1,) * recipe.shape[dim])
    return Recipe.concat([part.squeezed(dim) for part in parts], dim)
