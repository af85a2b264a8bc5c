"""Reshaping as algebra on recipes: dims are cut into factors, and neighbouring factors merged.

A tensor [6, 4] becomes [2, 3, 2, 2] by cutting 6 into 2 times 3 and 4 into 2 times 2, and comes back by merging them.
Both are what stacking and unstacking do, so that a recipe stays a list of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from holdfast.plan.recipe import Recipe

S = TypeVar("S")
Shape = tuple[int, ...]


class Unreshapable(Exception):
    """One shape cannot become the other; the message says why."""


def reshaped(recipe: Recipe[S], shape: Shape) -> Recipe[S]:
    """The same elements in row-major order under another shape; raises Unreshapable."""
    if recipe.shape == shape:
        return recipe
    factors = _factors(recipe.shape, shape)
    if factors is None:
        return reshaped(reshaped(recipe, (math.prod(shape),)), shape)
    for dim in reversed([dim for dim, size in enumerate(recipe.shape) if size == 1]):
        recipe = recipe.squeezed(dim)
    at = 0
    for size in recipe.shape:
        for factor in _of(factors[at:], size)[:-1]:
            recipe = _cut(recipe, at, factor)
            at += 1
        at += 1
    for dim, size in enumerate([size for size in shape if size != 1]):
        for _ in _of(recipe.shape[dim:], size)[:-1]:
            recipe = _merged(recipe, dim)
    for dim in (dim for dim, size in enumerate(shape) if size == 1):
        recipe = recipe.unsqueezed(dim)
    return recipe


def pieces(source: Shape, target: Shape) -> int:
    """How many boxes a whole tensor falls into; raises Unreshapable."""
    if source == target:
        return 1
    factors = _factors(source, target)
    if factors is None:
        flat = (math.prod(source),)
        return pieces(source, flat) * pieces(flat, target)
    whole = _innermost(factors, source) & _innermost(factors, target)
    return math.prod(factor for at, factor in enumerate(factors) if at not in whole)


def _factors(source: Shape, target: Shape) -> list[int] | None:
    """The coarsest dims that both shapes are made of, without those of size 1; None if there are none such.

    There are none for [6, 4] and [4, 6], of which the one has rows that the other cuts: the way leads by one dim.
    """
    if math.prod(source) != math.prod(target):
        raise Unreshapable(f"{math.prod(source)} elements are not {math.prod(target)}")
    if not math.prod(source):
        raise Unreshapable("it has no elements")
    ends = sorted({*_products(source), *_products(target)})
    factors: list[int] = []
    for small, large in zip((1, *ends), ends, strict=False):
        if large % small:
            return None
        factors.append(large // small)
    return [factor for factor in reversed(factors) if factor != 1]


def _innermost(factors: Sequence[int], shape: Shape) -> set[int]:
    """The places of the factors that are the last of a dim: only those can stay whole in a box."""
    found, at = set(), 0
    for size in (size for size in shape if size != 1):
        at += len(_of(factors[at:], size))
        found.add(at - 1)
    return found


def _products(shape: Shape) -> list[int]:
    """The products of the last dim, the last two and so on."""
    out, product = [], 1
    for size in reversed(shape):
        product *= size
        out.append(product)
    return out


def _of(factors: Sequence[int], size: int) -> list[int]:
    """The first factors, as many as come to `size`."""
    out: list[int] = []
    product = 1
    for factor in factors:
        if product == size:
            break
        out.append(factor)
        product *= factor
    return out


def _cut(recipe: Recipe[S], dim: int, count: int) -> Recipe[S]:
    """A dim as `count` times the rest of it."""
    size = recipe.shape[dim] // count
    return Recipe.concat([part.unsqueezed(dim) for part in recipe.split(dim, (size,) * count)], dim)


def _merged(recipe: Recipe[S], dim: int) -> Recipe[S]:
    """A dim and the next one as one."""
    parts = recipe.split(dim, (1,) * recipe.shape[dim])
    return Recipe.concat([part.squeezed(dim) for part in parts], dim)
