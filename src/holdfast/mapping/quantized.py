"""Check that a mapping changes the scales of quantized weights exactly as it changes the weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from holdfast.core.errors import Unsupported
from holdfast.layout.box import Box
from holdfast.plan.files import TensorSpec
from holdfast.plan.quantized_keys import Quantized, quantized_weights, relation
from holdfast.plan.recipe import NEW, Recipe, Term

_HINT = (
    "a mapping does not compute with scales: use weights that are not quantized (convert --dequantize bfloat16, or the "
    "tool that quantized them), or a mapping that only renames weights together with their scales"
)
_Specs = Mapping[str, TensorSpec]
_Recipes = Mapping[str, Recipe[str]]


def check_quantized(recipes: _Recipes, left_over: Collection[str], specs: _Specs) -> None:
    """Raise Unsupported if a mapping changes a quantized weight without changing its scales in the same way.

    `recipes` are the targets over source keys; `left_over` are sources that stay unchanged.
    """
    weights = quantized_weights({key: spec.dtype.name for key, spec in specs.items()})
    if not weights:
        return
    recipes_by_target = {**recipes, **{key: _whole(specs[key]) for key in left_over if key not in recipes}}
    for target, recipe in recipes_by_target.items():
        for source in recipe.sources():
            quantized = weights.get(source)
            if quantized is not None:
                _check_target(target, recipe, quantized, recipes_by_target, specs)
    _check_orphans(recipes_by_target, weights)


def _check_target(
    target: str, recipe: Recipe[str], weight: Quantized, recipes_by_target: _Recipes, specs: _Specs
) -> None:
    if any(term.casts for term in recipe.terms):
        raise Unsupported(f"{weight.what}; the mapping casts it to build {target!r}. {_HINT}")
    for key in weight.companions:
        leads = relation(weight.weight, key)
        name = target.removesuffix(leads[0]) + leads[1] if leads is not None else None
        other = recipes_by_target.get(name) if name is not None else None
        if other is None:
            raise Unsupported(
                f"{weight.what}; the mapping builds {target!r} from it but no {name!r} from its scales. {_HINT}"
            )
        own = [term for term in recipe.terms if term.source == weight.weight]
        matching = [term for term in other.terms if term.source == key]
        blocks = key in weight.block_scales() and len(specs[key].shape) == len(specs[weight.weight].shape)
        same = len(own) == len(matching) and all(
            _mirrors(a, b, specs) if blocks else _is_whole_copy(a, specs) and _is_whole_copy(b, specs)
            for a, b in zip(own, matching, strict=True)
        )
        if not same or (not blocks and not _only_stacks(recipe)):
            raise Unsupported(f"{weight.what}; the mapping joins, splits or transposes it to build {target!r}. {_HINT}")


def _check_orphans(recipes_by_target: _Recipes, weights: Mapping[str, Quantized]) -> None:
    """Raise Unsupported if scales are kept while their weight is removed, or the reverse."""
    used = {source for recipe in recipes_by_target.values() for source in recipe.sources()}
    for weight in weights.values():
        unpaired = [key for key in weight.companions if (key in used) != (weight.weight in used)]
        if unpaired:
            raise Unsupported(f"{weight.what}; the mapping removes one of them but not {unpaired[0]!r}. {_HINT}")


def _whole(spec: TensorSpec) -> Recipe[str]:
    return Recipe.whole(spec.key, spec.shape, spec.dtype)


def _is_whole_copy(term: Term[str], specs: _Specs) -> bool:
    """Return True if a term copies a whole tensor unchanged, alone or as a slice of a new dim."""
    shape = specs[term.source].shape
    kept = [dim for dim in term.order if dim != NEW]
    return term.part == Box.full(shape) and kept == list(range(len(shape)))


def _only_stacks(recipe: Recipe[str]) -> bool:
    """Return True if the terms of a recipe span every dim except new ones."""
    return all(
        dim == NEW or size == whole
        for term in recipe.terms
        for dim, size, whole in zip(term.order, term.box.sizes, recipe.shape, strict=True)
    )


def _mirrors(weight: Term[str], scale: Term[str], specs: _Specs) -> bool:
    """Return True if a term of block scales matches the term of its weight, block by block."""
    if weight.order != scale.order or scale.casts:
        return False
    shape, blocks = specs[weight.source].shape, specs[scale.source].shape
    sizes = [_block(whole, count) for whole, count in zip(shape, blocks, strict=True)]
    if any(size is None for size in sizes):
        return False
    of_target = [sizes[dim] if dim != NEW else 1 for dim in weight.order]
    inside = _aligned(weight.part, scale.part, sizes, shape)
    return inside and all(
        offset == quantized * (block or 1)
        for offset, quantized, block in zip(weight.box.offsets, scale.box.offsets, of_target, strict=True)
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
    """Return the number of elements per scale, a power of two in every format, or None if none fits."""
    if not count:
        return None if size else 1
    block = 1
    while block * count < size:
        block *= 2
    return block if math.ceil(size / block) == count else None
