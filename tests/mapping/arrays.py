"""Recipes carried out with numpy: what tests compare a mapping with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.format.dtypes import dtype_named, numpy_dtype
from holdfast.layout.box import Box
from holdfast.mapping import Compiled, Sized
from holdfast.mapping.program import Mapping as Program
from holdfast.plan.recipe import NEW, Recipe, cast_raw, is_filled

Array = npt.NDArray[Any]


def numbered(shape: Sequence[int], dtype: str = "float32", begin: int = 0) -> Array:
    """An array in which no two elements are equal."""
    size = int(np.prod(shape))
    return np.arange(begin, begin + size).astype(numpy_dtype(dtype)).reshape(shape)


def spec_of(array: Array) -> Sized:
    return Sized(array.shape, dtype_named(array.dtype.name))


def specs_of(arrays: Mapping[str, Array]) -> dict[str, Sized]:
    return {key: spec_of(array) for key, array in arrays.items()}


def made(recipe: Recipe[str], arrays: Mapping[str, Array], box: Box | None = None) -> tuple[Array, int]:
    """A box of a recipe's tensor, and how many elements of the sources were read for it."""
    box = Box.full(recipe.shape) if box is None else box
    out = np.full(box.sizes, 99, numpy_dtype(recipe.dtype.name))
    read = 0
    for term in recipe.overlapping(box):
        source = arrays[term.source]
        part = source[term.part.within(Box.full(source.shape))]
        assert part.shape == term.part.sizes, "a box outside of its source"
        read += part.size
        raw = cast_raw(part.view(f"u{part.itemsize}"), dtype_named(part.dtype.name), term.casts)
        taken = [dim for dim in term.order if dim != NEW]
        spare = [dim for dim in range(part.ndim) if dim not in taken]
        assert all(part.shape[dim] == 1 for dim in spare), "a dim of the source that is left out and not spare"
        turned = raw.view(out.dtype).transpose([*taken, *spare])
        out[term.box.within(box)] = turned.reshape(term.box.sizes)
    return out, read


def run(
    text: Any, arrays: Mapping[str, Array], targets: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Array]:
    """What a program makes of arrays, each target filled by its recipe."""
    compiled = Program.parse(text).compile(specs_of(arrays), targets, **options)
    return outputs(compiled, arrays)


def outputs(compiled: Compiled, arrays: Mapping[str, Array]) -> dict[str, Array]:
    out = {}
    for target, recipe in compiled.recipes.items():
        assert is_filled(recipe)
        out[target] = made(recipe, arrays)[0]
    return out


def same(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> bool:
    """Whether keys, shapes, dtypes and all bits are equal."""
    return found.keys() == wanted.keys() and all(
        found[key].shape == wanted[key].shape
        and found[key].dtype == wanted[key].dtype
        and found[key].tobytes() == wanted[key].tobytes()
        for key in wanted
    )
