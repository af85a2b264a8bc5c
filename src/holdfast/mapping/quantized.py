"""Mappings of quantized weights: allowed where the scales go exactly as their weights do, refused by name elsewhere."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from holdfast.core.errors import Unsupported
from holdfast.layout.box import Box
from holdfast.plan.files import TensorSpec
from holdfast.plan.quantized import Quantized, quantized_weights, relation
from holdfast.plan.recipe import NEW, Recipe, Term

_HINT = (
    "Holdfast does not compute with scales: take weights that are not quantized (from_pretrained with dequantize, or "
    "the tool that quantized them), or a mapping that only renames, the scales with their weights"
)
_Specs = Mapping[str, TensorSpec]
_Recipes = Mapping[str, Recipe[str]]


def check_quantized(recipes: _Recipes, left_over: Collection[str], specs: _Specs) -> None:
    """Raise Unsupported where a mapping changes a quantized weight and not, in the same way, what belongs to it.

    `recipes` are the targets over source keys; `left_over` are sources that stay as they are.
    """
    weights = quantized_weights({key: spec.dtype.name for key, spec in specs.items()})
    if not weights:
        return
    every = {**recipes, **{key: _whole(specs[key]) for key in left_over if key not in recipes}}
    for target, recipe in every.items():
        for source in recipe.sources():
            found = weights.get(source)
            if found is not None:
                _check_target(target, recipe, found, every, specs)
    _check_orphans(every, weights)


def _check_target(target: str, recipe: Recipe[str], weight: Quantized, every: _Recipes, specs: _Specs) -> None:
    if any(term.casts for term in recipe.terms):
        raise Unsupported(f"{weight.what}; the mapping casts it to make {target!r}. {_HINT}")
    for key in weight.companions:
        leads = relation(weight.weight, key)
        name = target.removesuffix(leads[0]) + leads[1] if leads is not None else None
        other = every.get(name) if name is not None else None
        if other is None:
            raise Unsupported(
                f"{weight.what}; the mapping makes {target!r} of it and no {name!r} of its scales. {_HINT}"
            )
        own = [term for term in recipe.terms if term.source == weight.weight]
        matching = [term for term in other.terms if term.source == key]
        blocks = key in weight.block_scales() and len(specs[key].shape) == len(specs[weight.weight].shape)
        same = len(own) == len(matching) and all(
            _mirrors(a, b, specs) if blocks else _is_moved(a, specs) and _is_moved(b, specs)
            for a, b in zip(own, matching, strict=True)
        )
        if not same or (not blocks and not _only_stacks(recipe)):
            raise Unsupported(f"{weight.what}; the mapping joins, cuts or turns it to make {target!r}. {_HINT}")


def _check_orphans(every: _Recipes, weights: Mapping[str, Quantized]) -> None:
    """Raise Unsupported for scales that stay while their weight is removed, or the other way round."""
    used = {source for recipe in every.values() for source in recipe.sources()}
    for weight in weights.values():
        lonely = [key for key in weight.companions if (key in used) != (weight.weight in used)]
        if lonely:
            raise Unsupported(f"{weight.what}; the mapping removes one of them, and {lonely[0]!r} not with it. {_HINT}")


def _whole(spec: TensorSpec) -> Recipe[str]:
    return Recipe.whole(spec.key, spec.shape, spec.dtype)


def _is_moved(term: Term[str], specs: _Specs) -> bool:
    """Return whether a term takes a whole tensor as it is, alone or as a slice of a new dim."""
    shape = specs[term.source].shape
    kept = [dim for dim in term.order if dim != NEW]
    return term.part == Box.full(shape) and kept == list(range(len(shape)))


def _only_stacks(recipe: Recipe[str]) -> bool:
    """Return whether the terms of a recipe are whole along every dim but new ones."""
    return all(
        dim == NEW or size == whole
        for term in recipe.terms
        for dim, size, whole in zip(term.order, term.box.sizes, recipe.shape, strict=True)
    )


def _mirrors(weight: Term[str], scale: Term[str], specs: _Specs) -> bool:
    """Return whether a term of block scales is the one of their weight, block for block."""
    if weight.order != scale.order or scale.casts:
        return False
    shape, blocks = specs[weight.source].shape, specs[scale.source].shape
    sizes = [_block(whole, count) for whole, count in zip(shape, blocks, strict=True)]
    if any(size is None for size in sizes):
        return False
    of_target = [sizes[dim] if dim != NEW else 1 for dim in weight.order]
    inside = _aligned(weight.part, scale.part, sizes, shape)
    return inside and all(
        offset == found * (block or 1)
        for offset, found, block in zip(weight.box.offsets, scale.box.offsets, of_target, strict=True)
    )


def _aligned(part: Box, scales: Box, sizes: list[int | None], shape: tuple[int, ...]) -> bool:
    for offset, size, scale, count, block, whole in zip(
        part.offsets, part.sizes, scales.offsets, scales.sizes, sizes, shape, strict=True
    ):
        step = block or 1
        ends = (offset + size == whole) or size % step == 0
        if offset != scale * step or count != math.ceil(size / step) or not ends:
            return False
    return True


def _block(size: int, count: int) -> int | None:
    """Return how many elements share a scale: a power of two, as every format has it; None if that does not fit."""
    if not count:
        return None if size else 1
    block = 1
    while block * count < size:
        block *= 2
    return block if math.ceil(size / block) == count else None
