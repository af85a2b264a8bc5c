"""Strided views of a torch storage as recipes, without a copy, for all strides that places can express."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe, Term
from holdfast.sources.torch_save.torch_names import PickledTensor

_PIECES = 4096
_REPEATED_BYTES = 16 * limits.MIB  # an expanded tensor may reach this size, or _REPEATED times its storage
_REPEATED = 4


def view_recipe(tensor: PickledTensor, key: str, file: str, begin: int, size: int, where: str) -> Recipe[Place]:
    """Return the recipe of a tensor whose storage has `size` bytes, starting at byte `begin` of a file.

    Complex dtypes that the format lacks are stored as pairs of reals, in a last dim of size 2.
    """
    logical = dtype_named(tensor.dtype)
    dtype = dtype_named(logical.stored)
    shape, strides, offset = tensor.shape, tensor.strides, tensor.offset
    if logical.pair:
        shape, strides, offset = (*shape, 2), (*(2 * stride for stride in strides), 1), 2 * offset
    volume = math.prod(shape)
    if not volume:
        return Recipe.whole(Place(TensorSpec(key, dtype, shape), file, begin), shape, dtype)
    last = offset + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    if (last + 1) * dtype.bytes > size:
        raise Damaged(
            f"{where}: {key!r} reaches to byte {(last + 1) * dtype.bytes} of its storage, which has {size} bytes"
        )
    if volume * dtype.bytes > max(_REPEATED_BYTES, _REPEATED * size):
        raise Unsupported(
            f"{where}: {key!r} repeats the {size} bytes of its storage to {volume * dtype.bytes}; save it unexpanded"
        )
    storage = _StorageView(key, dtype, shape, file, begin, size // dtype.bytes)
    terms = tuple(_terms(storage, (0,) * len(shape), shape, strides, offset, where))
    return Recipe(shape, dtype, terms)


class _StorageView:
    """The location of a tensor's elements, and the number of pieces it has been split into."""

    def __init__(self, key: str, dtype: DType, shape: tuple[int, ...], file: str, begin: int, elements: int) -> None:
        self.key, self.dtype, self.shape = key, dtype, shape
        self.file, self.begin, self.elements = file, begin, elements
        self.pieces = 0

    def place(self, shape: tuple[int, ...], at: int, *, part: bool) -> Place:
        spec = TensorSpec(f"{self.key}@{at}" if part else self.key, self.dtype, shape)
        return Place(spec, self.file, self.begin + at * self.dtype.bytes)


def _terms(
    storage: _StorageView,
    corner: tuple[int, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    where: str,
) -> Iterator[Term[Place]]:
    """Yield the terms of the box of `shape` at `corner`: one if it is a box of a dense array, else row by row."""
    storage.pieces += 1
    if storage.pieces > _PIECES:
        raise Unsupported(f"{where}: the strides of {storage.key!r} are too irregular; save tensor.contiguous()")
    whole = _as_box(storage, corner, shape, strides, offset)
    if whole is not None:
        yield whole
        return
    dim = max((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: (strides[d] == 0, strides[d]))
    for index in range(shape[dim]):
        inner = tuple(c + index if d == dim else c for d, c in enumerate(corner))
        sizes = tuple(1 if d == dim else n for d, n in enumerate(shape))
        yield from _terms(storage, inner, sizes, strides, offset + index * strides[dim], where)


def _as_box(
    storage: _StorageView, corner: tuple[int, ...], shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Term[Place] | None:
    """Return the box as one box of a dense row-major array in the storage, or None."""
    if _is_dense(shape, strides):
        place = storage.place(shape, offset, part=shape != storage.shape)
        return Term(Box(corner, shape), place, Box.full(shape), tuple(range(len(shape))))
    wide = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: (-strides[d], d))
    steps = [strides[d] for d in wide]
    steps += [1] if steps[-1] > 1 else []  # an extra dim, of which one element is used
    if not steps[-1] or any(outer % inner for outer, inner in itertools.pairwise(steps)):
        return None
    order = [*wide, *[-1] * (len(steps) - len(wide)), *(d for d in range(len(shape)) if shape[d] == 1)]
    inner_sizes = [outer // inner for outer, inner in itertools.pairwise(steps)]
    dense = (shape[wide[0]], *inner_sizes, *(1,) * (len(order) - len(steps)))
    taken = tuple(shape[d] if d >= 0 else 1 for d in order)
    for indexes, start in _beginnings(offset, steps):
        part = Box((*indexes, *(0,) * (len(order) - len(steps))), taken)
        if Box.full(dense).contains(part) and start + math.prod(dense) <= storage.elements:
            place = storage.place(dense, start, part=dense != storage.shape)
            return Term(Box(corner, shape), place, part, tuple(order.index(d) for d in range(len(shape))))
    return None


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _beginnings(offset: int, steps: list[int]) -> Iterator[tuple[list[int], int]]:
    """Yield candidate starts of a dense array with the index of the box: at the box, or at the start of its row."""
    yield [0] * len(steps), offset
    begin = offset - offset % steps[0]
    left, indexes = offset - begin, [0]
    for step in steps[1:]:
        indexes.append(left // step)
        left %= step
    yield indexes, begin
