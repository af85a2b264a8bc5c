"""Terms on their way: bytes of a source turned, cast and put into a destination."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from holdfast.format.dtypes import DType, numpy_dtype
from holdfast.layout.box import Box
from holdfast.plan.arrays import Destination, RawArray, part_of
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe, Term


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
        self._dtype = term.source.spec.dtype
        self._casts = term.casts

    def direct(self) -> RawArray | None:
        array = None if self._casts else self._inner.direct()
        if array is None:
            return None
        return part_of(array, self._at, self._held).transpose(_inverse(self._order))

    def put(self, part: Box, data: RawArray) -> None:
        offsets = tuple(at + part.offsets[dim] for at, dim in zip(self._at.offsets, self._order, strict=True))
        target = Box(offsets, tuple(part.sizes[dim] for dim in self._order))
        self._inner.put(target, cast_raw(data, self._dtype, self._casts).transpose(self._order))


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    inverse = [0] * len(order)
    for dim, source in enumerate(order):
        inverse[source] = dim
    return tuple(inverse)


def cast_raw(data: RawArray, dtype: DType, casts: Sequence[DType]) -> RawArray:
    """Raw elements of `dtype` cast to each of `casts` in turn, raw again."""
    for target in casts:
        if target is dtype:
            continue
        typed = data.view(numpy_dtype(dtype.name))
        with np.errstate(over="ignore", invalid="ignore"):  # what does not fit is an infinity, as torch has it
            data = typed.astype(numpy_dtype(target.name)).view(f"u{target.bytes}")
        dtype = target
    return data
