"""Tensors of torch DCP as recipes of their chunks, also Megatron's flattened ones; gaps and overlaps rejected."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from holdfast.core.errors import Damaged, Unsupported
from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box, flat_boxes
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe, Term
from holdfast.sources.dcp.items import DcpItems
from holdfast.sources.dcp.metadata import METADATA, DcpTensor, StreamLocation
from holdfast.sources.torch_save.views import view_recipe
from holdfast.sources.trees.leaf import TensorLeaf


def leaf_of(key: str, stored: DcpTensor, items: DcpItems, where: str) -> TensorLeaf:
    """Return a whole tensor built from its chunks. Raises Damaged if they leave a gap or overlap."""
    logical = dtype_named(stored.dtype)
    dtype = dtype_named(logical.stored)
    boxes = [box for box, _ in stored.chunks]
    if not fills(boxes, stored.shape):
        raise Damaged(f"{where}: the chunks of {key[:80]!r} do not cover its shape {list(stored.shape)} exactly once")
    if stored.original is not None:
        return TensorLeaf(_unflattened(key, stored, items, where))
    terms: list[Term[Place]] = []
    for box, item in stored.chunks:
        if box.volume:
            terms += _chunk_terms(key, stored, box, item, items, where)
    shape = (*stored.shape, 2) if logical.pair else stored.shape
    if not terms:  # an empty tensor can be placed anywhere
        file, at = (stored.chunks[0][1].file, stored.chunks[0][1].begin) if stored.chunks else (METADATA, 0)
        return TensorLeaf(Recipe.whole(Place(TensorSpec(key, dtype, shape), file, at), shape, dtype))
    return TensorLeaf(Recipe(shape, dtype, tuple(terms)), logical.name if logical.name != dtype.name else None)


def _chunk_recipe(key: str, dtype: str, box: Box, item: StreamLocation, items: DcpItems, where: str) -> Recipe[Place]:
    tensor, begin, size = items.tensor(item, f"{where}: {key[:80]!r}")
    if tensor.shape != box.sizes or tensor.dtype != dtype:
        raise Damaged(
            f"{where}: the chunk of {key[:80]!r} at {list(box.offsets)} is {tensor.dtype}{list(tensor.shape)} in "
            f"{item.file}, but the metadata says {dtype}{list(box.sizes)}"
        )
    name = f"{key}@{','.join(map(str, box.offsets))}"
    return view_recipe(tensor, name, item.file, begin, size, where)


def _chunk_terms(
    key: str, stored: DcpTensor, box: Box, item: StreamLocation, items: DcpItems, where: str
) -> Iterator[Term[Place]]:
    recipe = _chunk_recipe(key, stored.dtype, box, item, items, where)
    offsets = (*box.offsets, 0) if len(recipe.shape) > len(box.offsets) else box.offsets
    for term in recipe.terms:
        offsets_in_whole = tuple(a + b for a, b in zip(term.box.offsets, offsets, strict=True))
        yield Term(Box(offsets_in_whole, term.box.sizes), term.source, term.part, term.order)


def _unflattened(key: str, stored: DcpTensor, items: DcpItems, where: str) -> Recipe[Place]:
    """Rebuild a tensor whose grid cells Megatron flattened: the last dim runs over the elements of each cell."""
    original, grid = stored.original or (), stored.shape[:-1]
    cell = tuple(size // max(1, parts) for size, parts in zip(original, grid, strict=False))
    whole = len(grid) == len(original) and all(size == c * g for size, c, g in zip(original, cell, grid, strict=True))
    if not whole or math.prod(cell) != stored.shape[-1] or stored.dtype != dtype_named(stored.dtype).stored:
        raise Unsupported(
            f"{where}: {key[:80]!r} of shape {list(stored.shape)} is not a flattened form of {list(original)}"
        )
    terms: list[Term[Place]] = []
    for box, item in stored.chunks:
        if not box.volume:
            continue
        recipe = _chunk_recipe(key, stored.dtype, box, item, items, where)
        if any(size != 1 for size in box.sizes[:-1]) or len(recipe.terms) != 1 or not recipe.terms[0].is_plain:
            raise Unsupported(f"{where}: {key[:80]!r} has a chunk that spans several grid cells")
        terms += _cell_terms(recipe.terms[0].source, box, cell)
    return Recipe(original, dtype_named(stored.dtype), tuple(terms))


def _cell_terms(place: Place, box: Box, cell: tuple[int, ...]) -> Iterator[Term[Place]]:
    """Yield the boxes of one grid cell that cover a run of its elements."""
    corner = tuple(index * size for index, size in zip(box.offsets[:-1], cell, strict=True))
    begin, stop = box.offsets[-1], box.offsets[-1] + box.sizes[-1]
    at = 0
    for inner in flat_boxes(cell, begin, stop):
        spec = TensorSpec(f"{place.spec.key}+{at}", place.spec.dtype, inner.sizes)
        source = Place(spec, place.file, place.begin + at * place.spec.dtype.bytes)
        offsets = tuple(a + b for a, b in zip(corner, inner.offsets, strict=True))
        yield Term(Box(offsets, inner.sizes), source, Box.full(inner.sizes), tuple(range(len(cell))))
        at += inner.volume


def fills(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return True if boxes cover a shape exactly once; fast for the many boxes of a large mesh."""
    full = Box.full(shape)
    if sum(box.volume for box in boxes) != full.volume or not all(full.contains(box) for box in boxes):
        return False
    solid = [box for box in boxes if box.volume]
    if len(solid) < 2 or not shape:
        return len(solid) < 2
    dim = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in solid}))
    near: list[Box] = []
    for box in sorted(solid, key=lambda box: box.offsets[dim]):
        near = [other for other in near if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        if any(other.intersect(box) is not None for other in near):
            return False
        near.append(box)
    return True
