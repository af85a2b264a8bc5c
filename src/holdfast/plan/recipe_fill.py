"""Filling a destination from a recipe: permute and cast the bytes of each term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import EllipsisType

import numpy as np

from holdfast.format.dtypes import DType, numpy_dtype
from holdfast.layout.box import Box
from holdfast.plan.arrays import RawArray, ShardDestination, part_of
from holdfast.plan.files import Place
from holdfast.plan.recipe import NEW, Recipe, Term

Index = tuple[slice | int | EllipsisType | None, ...]

_SATURATED = {"float8_e4m3fn": 448.0}  # no infinity: torch saturates at the largest value


def destinations_of(
    recipe: Recipe[Place], box: Box, inner: ShardDestination
) -> Iterator[tuple[tuple[Place, Box], ShardDestination]]:
    """Yield the boxes of places that fill `box` of a recipe's tensor, each with its destination in `inner`."""
    for term in recipe.overlapping(box):
        whole = term.is_plain and term.box == box
        yield (term.source, term.part), inner if whole else TermDestination(inner, box, term)


class TermDestination:
    """The destination of one term's source box, inside a destination that holds the box `held` of the target."""

    def __init__(self, inner: ShardDestination, held: Box, term: Term[Place]) -> None:
        self._inner = inner
        self._at = term.box.relative_to(held)
        self._held = Box.full(held.sizes)
        self._order = term.order
        self._rank = len(term.part.sizes)
        self._dtype = term.source.spec.dtype
        self._casts = term.casts

    def direct(self) -> RawArray | None:
        array = None if self._casts else self._inner.direct()
        if array is None:
            return None
        return to_source_dims(part_of(array, self._at, self._held), self._order, self._rank)

    def put(self, part: Box, data: RawArray) -> None:
        offsets = tuple(
            at if dim == NEW else at + part.offsets[dim] for at, dim in zip(self._at.offsets, self._order, strict=True)
        )
        target = Box(offsets, tuple(1 if dim == NEW else part.sizes[dim] for dim in self._order))
        self._inner.put(target, to_target_dims(cast_raw(data, self._dtype, self._casts), self._order))


def target_view_steps(order: Sequence[int], rank: int) -> tuple[Index, list[int], Index]:
    """Return the index, permutation and second index that view a part of `rank` dims with its target's dims."""
    kept = sorted(dim for dim in order if dim != NEW)
    squeeze = (*(slice(None) if dim in kept else 0 for dim in range(rank)), ...)
    unsqueeze = (*(None if dim == NEW else slice(None) for dim in order), ...)
    return squeeze, [kept.index(dim) for dim in order if dim != NEW], unsqueeze


def to_target_dims(data: RawArray, order: Sequence[int]) -> RawArray:
    """Return a view with the target's dims: dim d is dim `order[d]` of `data`, or a new dim."""
    squeeze, permutation, unsqueeze = target_view_steps(order, data.ndim)
    return data[squeeze].transpose(permutation)[unsqueeze]


def to_source_dims(data: RawArray, order: Sequence[int], rank: int) -> RawArray:
    """Return a view of a target's box with the `rank` dims of its source: the inverse of `to_target_dims`."""
    places = {source: dim for dim, source in enumerate(order) if source != NEW}
    return to_target_dims(data, [places.get(dim, NEW) for dim in range(rank)])


def cast_raw(data: RawArray, dtype: DType, casts: Sequence[DType]) -> RawArray:
    """Cast raw elements of `dtype` to each of `casts` in turn; the result is raw."""
    for target in casts:
        if target is dtype:
            continue
        typed = data.view(numpy_dtype(dtype.name))
        with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes infinity, as in torch
            if target.name in _SATURATED:
                typed = np.clip(typed.astype(np.float32), -_SATURATED[target.name], _SATURATED[target.name])
            data = typed.astype(numpy_dtype(target.name)).view(f"u{target.bytes}")
        dtype = target
    return data
