"""Terms on their way: bytes of a source turned, cast and put into a destination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import EllipsisType

import numpy as np

from holdfast.format.dtypes import DType, numpy_dtype
from holdfast.layout.box import Box
from holdfast.plan.arrays import Destination, RawArray, part_of
from holdfast.plan.files import Place
from holdfast.plan.recipe import NEW, Recipe, Term

Index = tuple[slice | int | EllipsisType | None, ...]

_SATURATED = {"float8_e4m3fn": 448.0}  # it has no infinity, and torch stays at its largest


def destinations_of(
    recipe: Recipe[Place], box: Box, inner: Destination
) -> Iterator[tuple[tuple[Place, Box], Destination]]:
    """What fills `box` of a recipe's tensor: boxes of places, each with where it goes in `inner`."""
    for term in recipe.overlapping(box):
        whole = term.is_plain and term.box == box
        yield (term.source, term.part), inner if whole else TermDestination(inner, box, term)


class TermDestination:
    """A destination for the source box of one term, in a destination that holds `held` of the target."""

    def __init__(self, inner: Destination, held: Box, term: Term[Place]) -> None:
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
        return turned_back(part_of(array, self._at, self._held), self._order, self._rank)

    def put(self, part: Box, data: RawArray) -> None:
        offsets = tuple(
            at if dim == NEW else at + part.offsets[dim] for at, dim in zip(self._at.offsets, self._order, strict=True)
        )
        target = Box(offsets, tuple(1 if dim == NEW else part.sizes[dim] for dim in self._order))
        self._inner.put(target, turned(cast_raw(data, self._dtype, self._casts), self._order))


def turning(order: Sequence[int], rank: int) -> tuple[Index, list[int], Index]:
    """How a view turns a part of `rank` dims to its target's: an index, then a permutation, then an index."""
    kept = sorted(dim for dim in order if dim != NEW)
    dropped = (*(slice(None) if dim in kept else 0 for dim in range(rank)), ...)
    raised = (*(None if dim == NEW else slice(None) for dim in order), ...)
    return dropped, [kept.index(dim) for dim in order if dim != NEW], raised


def turned(data: RawArray, order: Sequence[int]) -> RawArray:
    """A view of a source's part with the dims of its target: dim d is dim `order[d]` of `data`, or a new one."""
    dropped, moved, raised = turning(order, data.ndim)
    return data[dropped].transpose(moved)[raised]


def turned_back(data: RawArray, order: Sequence[int], rank: int) -> RawArray:
    """A view of a target's box with the `rank` dims of its source: what `turned` did, undone."""
    places = {source: dim for dim, source in enumerate(order) if source != NEW}
    return turned(data, [places.get(dim, NEW) for dim in range(rank)])


def cast_raw(data: RawArray, dtype: DType, casts: Sequence[DType]) -> RawArray:
    """Raw elements of `dtype` cast to each of `casts` in turn, raw again."""
    for target in casts:
        if target is dtype:
            continue
        typed = data.view(numpy_dtype(dtype.name))
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is an infinity, as torch has it
            if target.name in _SATURATED:
                typed = np.clip(typed.astype(np.float32), -_SATURATED[target.name], _SATURATED[target.name])
            data = typed.astype(numpy_dtype(target.name)).view(f"u{target.bytes}")
        dtype = target
    return data
