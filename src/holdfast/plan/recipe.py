"""Recipes: a tensor as boxes of others; permute, split, concat, cast, substitute; copies into its destination.

A term maps a box of a source to a box of the target, with permuted dims and cast elements. The
terms of a recipe fill the target. Renaming, joining, splitting and transposing tensors is
algebra on recipes: the plan is known before anything is read.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Generic, TypeVar

import numpy as np

from holdfast.format.dtypes import DType, numpy_dtype
from holdfast.layout.box import Box
from holdfast.plan.files import FlatArray, FlatDestination, Place, RawArray, ShardDestination, part_of

S = TypeVar("S")
R = TypeVar("R")

NEW = -1  # in `Term.order`: a dim of size 1 that the source does not have
_SATURATED = {"float8_e4m3fn": 448.0}  # no infinity: torch saturates at the largest value


@dataclass(frozen=True, slots=True)
class Term(Generic[S]):
    """`box` of the target equals `part` of `source`: dim d of the target is dim `order[d]` of the source.

    Source and target may have different ranks. A target dim with order NEW has size 1 in the box. A
    source dim missing from `order` has size 1 in the part.
    Elements are cast to each of `casts` in turn, which keeps the rounding of intermediate dtypes.
    """

    box: Box
    source: S
    part: Box
    order: tuple[int, ...]
    casts: tuple[DType, ...] = ()

    def restricted_to(self, box: Box) -> Term[S] | None:
        """Return the term for the overlap with `box` of the target, or None without an overlap."""
        common = self.box.intersect(box)
        if common is None:
            return None
        if common == self.box:
            return self
        offsets, sizes = list(self.part.offsets), list(self.part.sizes)
        for dim, source_dim in enumerate(self.order):
            if source_dim != NEW:
                offsets[source_dim] += common.offsets[dim] - self.box.offsets[dim]
                sizes[source_dim] = common.sizes[dim]
        return replace(self, box=common, part=Box(tuple(offsets), tuple(sizes)))

    def target_box(self, part: Box) -> Box:
        """Return the box of the target for a box inside `self.part`."""
        offsets = tuple(
            at if dim == NEW else at + part.offsets[dim] - self.part.offsets[dim]
            for at, dim in zip(self.box.offsets, self.order, strict=True)
        )
        return Box(offsets, tuple(1 if dim == NEW else part.sizes[dim] for dim in self.order))

    @property
    def is_plain(self) -> bool:
        """True if elements are copied as they are, without a cast or permutation."""
        return not self.casts and self.order == tuple(range(len(self.part.sizes)))


@dataclass(frozen=True, slots=True)
class Recipe(Generic[S]):
    """A tensor of `shape` and `dtype` as disjoint terms that fill it."""

    shape: tuple[int, ...]
    dtype: DType
    terms: tuple[Term[S], ...]

    @staticmethod
    def whole(source: S, shape: tuple[int, ...], dtype: DType) -> Recipe[S]:
        """Return the recipe of an unchanged source."""
        full = Box.full(shape)
        return Recipe(shape, dtype, (Term(full, source, full, tuple(range(len(shape)))),))

    def permuted(self, order: Sequence[int]) -> Recipe[S]:
        """Return the recipe with permuted dims, as in numpy's transpose."""
        order = tuple(order)
        terms = [
            Term(_permuted(term.box, order), term.source, term.part, _taken(term.order, order), term.casts)
            for term in self.terms
        ]
        return Recipe(_taken(self.shape, order), self.dtype, tuple(terms))

    def transposed(self) -> Recipe[S]:
        """Return the recipe with all dims reversed."""
        return self.permuted(range(len(self.shape) - 1, -1, -1))

    def unsqueezed(self, dim: int) -> Recipe[S]:
        """Return the recipe with a new dim of size 1 before `dim`."""
        terms = (
            replace(
                term, box=_unsqueezed(term.box, dim), order=(*term.order[:dim], _spare_dim(term), *term.order[dim:])
            )
            for term in self.terms
        )
        return Recipe((*self.shape[:dim], 1, *self.shape[dim:]), self.dtype, tuple(terms))

    def squeezed(self, dim: int) -> Recipe[S]:
        """Return the recipe without `dim`, whose size is 1."""
        terms = (
            replace(term, box=_squeezed(term.box, dim), order=(*term.order[:dim], *term.order[dim + 1 :]))
            for term in self.terms
        )
        return Recipe((*self.shape[:dim], *self.shape[dim + 1 :]), self.dtype, tuple(terms))

    def cast(self, dtype: DType) -> Recipe[S]:
        if dtype is self.dtype:
            return self
        terms = (replace(term, casts=(*term.casts, dtype)) for term in self.terms)
        return Recipe(self.shape, dtype, tuple(terms))

    def uncast(self, dtype: DType) -> Recipe[S]:
        """Return the recipe without casts, for sources that have `dtype` already."""
        return Recipe(self.shape, dtype, tuple(replace(term, casts=()) for term in self.terms))

    def narrow(self, dim: int, begin: int, size: int) -> Recipe[S]:
        """Return the recipe of `size` elements along a dim, starting at `begin`."""
        offsets = tuple(begin if d == dim else 0 for d in range(len(self.shape)))
        box = Box(offsets, tuple(size if d == dim else whole for d, whole in enumerate(self.shape)))
        terms = (replace(term, box=term.box.relative_to(box)) for term in self.overlapping(box))
        return Recipe(box.sizes, self.dtype, tuple(terms))

    def split(self, dim: int, sizes: Sequence[int]) -> list[Recipe[S]]:
        """Split along a dim into parts of these sizes, which fill it; visits each term once."""
        ends = list(itertools.accumulate(sizes))
        parts: list[list[Term[S]]] = [[] for _ in sizes]
        for term in self.terms:
            begin, end = term.box.offsets[dim], term.box.stops[dim]
            at = bisect.bisect_right(ends, begin)
            while begin < end:
                taken = min(end, ends[at]) - begin
                parts[at].append(_shifted(term, dim, begin, taken, ends[at] - sizes[at]))
                begin, at = begin + taken, at + 1
        shapes = (tuple(size if d == dim else whole for d, whole in enumerate(self.shape)) for size in sizes)
        return [Recipe(shape, self.dtype, tuple(terms)) for shape, terms in zip(shapes, parts, strict=True)]

    def overlapping(self, box: Box) -> Iterator[Term[S]]:
        """Yield the terms for the overlap with `box`, still in the target's coordinates."""
        for term in self.terms:
            found = term.restricted_to(box)
            if found is not None:
                yield found

    @staticmethod
    def concat(parts: Sequence[Recipe[S]], dim: int) -> Recipe[S]:
        """Concatenate parts along a dim; their dtypes and other dims are equal."""
        terms: list[Term[S]] = []
        at = 0
        for part in parts:
            for term in part.terms:
                offsets = list(term.box.offsets)
                offsets[dim] += at
                box = Box(tuple(offsets), term.box.sizes)
                terms.append(Term(box, term.source, term.part, term.order, term.casts))
            at += part.shape[dim]
        shape = tuple(at if d == dim else size for d, size in enumerate(parts[0].shape))
        return Recipe(shape, parts[0].dtype, tuple(_joined(terms, dim)))

    def substituted(self, find: Callable[[S], Recipe[R]]) -> Recipe[R]:
        """Return the recipe with each source replaced by its own recipe."""
        terms: list[Term[R]] = []
        for term in self.terms:
            made = find(term.source)
            # An empty tensor overlaps nothing but still needs a source.
            for inner in made.overlapping(term.part) if term.part.volume else made.terms[:1]:
                order = tuple(NEW if dim == NEW else inner.order[dim] for dim in term.order)
                casts = (*inner.casts, *term.casts)
                terms.append(Term(term.target_box(inner.box), inner.source, inner.part, order, casts))
        return Recipe(self.shape, self.dtype, tuple(terms))

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Return True if the tensor is one unchanged source of `shape`."""
        return len(self.terms) == 1 and self.terms[0].is_plain and self.terms[0].part == Box.full(shape)

    def sources(self) -> list[S]:
        """Return the distinct sources in the order of the terms."""
        return list(dict.fromkeys(term.source for term in self.terms))


def _shifted(term: Term[S], dim: int, begin: int, size: int, origin: int) -> Term[S]:
    """Return `size` elements of a term's dim starting at `begin`, with the box relative to `origin`."""
    offsets, sizes = list(term.box.offsets), list(term.box.sizes)
    part_offsets, part_sizes = list(term.part.offsets), list(term.part.sizes)
    source_dim = term.order[dim]
    if source_dim != NEW:
        part_offsets[source_dim] += begin - offsets[dim]
        part_sizes[source_dim] = size
    offsets[dim] = begin - origin
    sizes[dim] = size
    part = Box(tuple(part_offsets), tuple(part_sizes))
    return Term(Box(tuple(offsets), tuple(sizes)), term.source, part, term.order, term.casts)


def _permuted(box: Box, order: tuple[int, ...]) -> Box:
    return Box(_taken(box.offsets, order), _taken(box.sizes, order))


def _taken(values: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([values[dim] for dim in order])


def _unsqueezed(box: Box, dim: int) -> Box:
    return Box((*box.offsets[:dim], 0, *box.offsets[dim:]), (*box.sizes[:dim], 1, *box.sizes[dim:]))


def _squeezed(box: Box, dim: int) -> Box:
    return Box((*box.offsets[:dim], *box.offsets[dim + 1 :]), (*box.sizes[:dim], *box.sizes[dim + 1 :]))


def _spare_dim(term: Term[S]) -> int:
    """Return an unused dim of the source, so that boxes split along it can be merged again, else NEW."""
    return next((dim for dim in range(len(term.part.sizes)) if dim not in term.order), NEW)


def _joined(terms: Sequence[Term[S]], dim: int) -> Iterator[Term[S]]:
    """Yield the terms in order, merging neighbors along `dim` that are neighbors in one source."""
    last: Term[S] | None = None
    for term in terms:
        if last is not None and _follows(last, term, dim):
            last = replace(
                last, box=_grown(last.box, term.box, dim), part=_grown(last.part, term.part, last.order[dim])
            )
            continue
        if last is not None:
            yield last
        last = term
    if last is not None:
        yield last


def _follows(last: Term[S], term: Term[S], dim: int) -> bool:
    if last.order[dim] == NEW:
        return False
    same = last.source == term.source and last.order == term.order and last.casts == term.casts
    return same and _adjacent(last.box, term.box, dim) and _adjacent(last.part, term.part, last.order[dim])


def _adjacent(a: Box, b: Box, dim: int) -> bool:
    """Return True if `b` begins where `a` ends along `dim` and equals it in all other dims."""
    for d, (offset, size, other, width) in enumerate(zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)):
        if (offset + size != other) if d == dim else ((offset, size) != (other, width)):
            return False
    return True


def _grown(a: Box, b: Box, dim: int) -> Box:
    return Box(a.offsets, tuple(size + b.sizes[d] if d == dim else size for d, size in enumerate(a.sizes)))


def is_filled(recipe: Recipe[S]) -> bool:
    """Return True if the terms cover each element of the target exactly once."""
    boxes = [term.box for term in recipe.terms]
    if sum(box.volume for box in boxes) != Box.full(recipe.shape).volume:
        return False
    if any(not Box.full(recipe.shape).contains(box) for box in boxes):
        return False
    return all(a.intersect(b) is None for a, b in itertools.combinations(boxes, 2))


Index = tuple[slice | int | EllipsisType | None, ...]


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

    def flat(self) -> FlatDestination | None:
        return FlatArray.of(self.direct())

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
