"""`--dequantize`: weights that are stored as small numbers times scales become weights of a float dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.convert.computed import ComputedTensors, ReadBox, TensorInputs, rows_per_band
from holdfast.convert.quantization_config import (
    check_method,
    config_block,
    dequantized_files,
    quantization_of,
    read_config,
)
from holdfast.core.errors import InvalidArgument, Mismatch, NotFound
from holdfast.core.names import group_folder
from holdfast.format.dtypes import DType, dtype_named, numpy_dtype
from holdfast.layout.box import Box
from holdfast.plan.contents import Group
from holdfast.plan.files import Place, RawArray, TensorSpec
from holdfast.plan.recipe import NEW, Recipe, Term, cast_raw
from holdfast.plan.weight_scales import ScaledWeight, cache_scales, scaled_weights
from holdfast.sources.foreign import with_contents

_DTYPES = ("bfloat16", "float16", "float32")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Recoded:
    """A source whose weights are dequantized or quantized, its side files, and notes for the user."""

    source: Checkpoint
    files: dict[str, bytes]
    notes: tuple[str, ...]


def dequantized(source: Checkpoint, files: Mapping[str, bytes], name: str) -> Recoded:
    """Return a source with the values of its quantized weights, in the dtype `name`.

    Raises Mismatch, with all of them, for weights without scales, or with scales of another shape; Unsupported for
    a quantization that Holdfast does not compute; NotFound if no weight is quantized.
    """
    if name not in _DTYPES:
        raise InvalidArgument(f"--dequantize {name}: weights can be dequantized to {', '.join(_DTYPES)}")
    dtype, computed, notes = dtype_named(name), ComputedTensors(source), []
    groups, out = dict(source.contents.groups), dict(files)
    for group_name, group in source.contents.groups.items():
        if group.kind != "module":
            continue
        folder = group_folder(group_name)
        config = read_config(files, folder)
        check_method(quantization_of(config), source.path)
        specs = {key: TensorSpec(key, recipe.dtype, recipe.shape) for key, recipe in group.tensors.items()}
        found, problems = scaled_weights(specs, config_block(config))
        if problems:
            raise _refusal(source, group_name, problems)
        if found:
            unused = [key for weight in found.values() for key in weight.unused] + cache_scales(specs)
            groups[group_name] = _dequantized_group(group, found, set(unused), dtype, computed)
            out = dequantized_files(out, folder, name)
            notes.append(f"{group_name}: {len(found)} weights dequantized to {name}")
            if unused:
                notes.append(f"{group_name}: omitted {len(unused)} scales of activations, such as {unused[0]}")
    if not computed.files:
        raise NotFound(f"{source.path}: --dequantize {name}: no weight is quantized")
    stored = (*source.contents.files, *computed.stored_files())
    contents = replace(source.contents, groups=groups, files=stored)
    return Recoded(with_contents(source, contents, {}, computed.files), out, tuple(notes))


def _refusal(source: Checkpoint, group: str, problems: Mapping[str, Exception]) -> Exception:
    lines = [str(problem) for problem in problems.values()]
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    kind = type(next(iter(problems.values())))
    return kind(f"{source.path}: {group} cannot be dequantized:\n  " + "\n  ".join(lines[:_SHOWN]) + more)


def _dequantized_group(
    group: Group, found: Mapping[str, ScaledWeight], unused: set[str], dtype: DType, computed: ComputedTensors
) -> Group:
    dropped = unused | {weight.scale for weight in found.values()}
    tensors: dict[str, Recipe[Place]] = {}
    for key, recipe in group.tensors.items():
        if key in found:
            scale = group.tensors[found[key].scale]

            def add(number: int, weight: Recipe[Place], scales: Recipe[Place], key: str = key) -> Recipe[Place]:
                return computed.add(f"{key}:{number}", Dequantization(weight, scales, found[key], dtype))

            tensors[key] = by_matrix(recipe, scale, dtype, add)
        elif key not in dropped:
            tensors[key] = recipe
    aliases = {alias: key for alias, key in group.aliases.items() if key in tensors}
    return replace(group, tensors=tensors, aliases=aliases)


def by_matrix(
    weight: Recipe[Place],
    scale: Recipe[Place],
    dtype: DType,
    add: Callable[[int, Recipe[Place], Recipe[Place]], Recipe[Place]],
) -> Recipe[Place]:
    """Return the recipe of a computed weight; stacked experts are computed one matrix at a time."""
    if len(weight.shape) == 2:
        return add(0, weight, scale)
    terms = []
    for number in range(weight.shape[0]):
        own = scale if math.prod(scale.shape) == 1 else scale.narrow(0, number, 1).squeezed(0)
        made = add(number, weight.narrow(0, number, 1).squeezed(0), own)
        box = Box((number, 0, 0), (1, *made.shape))
        terms.append(Term(box, made.sources()[0], Box.full(made.shape), (NEW, 0, 1)))
    return Recipe(weight.shape, dtype, tuple(terms))


@dataclass(frozen=True, slots=True)
class Dequantization:
    """A matrix of small numbers times its scales."""

    weight: Recipe[Place]
    scale: Recipe[Place]
    scaled: ScaledWeight
    dtype: DType

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def band_rows(self) -> int:
        return rows_per_band(self.shape[1], self.scaled.block[0] if self.scaled.scheme == "block" else 1)

    def inputs(self, begin: int, end: int) -> TensorInputs:
        yield self.weight, Box((begin, 0), (end - begin, self.shape[1]))
        yield self.scale, self._scale_box(begin, end)

    def _scale_box(self, begin: int, end: int) -> Box:
        full = Box.full(self.scale.shape)
        if self.scaled.scheme == "tensor":
            return full
        first, last = begin // self.scaled.block[0], -(-end // self.scaled.block[0])
        return Box((first, *full.offsets[1:]), (last - first, *full.sizes[1:]))

    def compute(self, begin: int, end: int, read: ReadBox) -> RawArray:
        scales = read(self.scale, self._scale_box(begin, end)).view(numpy_dtype(self.scale.dtype.name))
        factors = scales.astype(np.float32)
        if not np.isfinite(factors).all():
            raise Mismatch(f"{self.scaled.scale!r} has scales that are not finite: the weight cannot be dequantized")
        values = as_float32(read(self.weight, Box((begin, 0), (end - begin, self.shape[1]))), self.weight.dtype)
        with np.errstate(over="ignore"):
            multiply_blocks(values, factors.reshape(-1, _columns(factors)), self.scaled.block)
        cast = cast_raw(values.view("u4"), dtype_named("float32"), (self.dtype,))
        if self.dtype.name == "float16" and np.isinf(cast.view(np.float16)).any():
            raise Mismatch(f"{self.scaled.weight!r} has values beyond the range of float16; choose bfloat16 or float32")
        return cast


def _columns(factors: RawArray) -> int:
    return factors.shape[1] if factors.ndim == 2 else 1


def multiply_blocks(values: RawArray, factors: RawArray, block: tuple[int, int]) -> None:
    """Multiply every block of a matrix by its factor, in place. The last blocks may be smaller."""
    if factors.shape[1] == 1:
        values *= np.repeat(factors, min(block[0], len(values)), axis=0)[: len(values)]
        return
    columns = np.repeat(factors, block[1], axis=1)[:, : values.shape[1]]
    for number, row in enumerate(columns):
        values[number * block[0] : (number + 1) * block[0]] *= row


@cache
def _float8_pairs(name: str) -> Any:
    """Return the values of every pair of 8-bit floats, as the bits of two float32: half the lookups."""
    values = np.arange(256, dtype=np.uint8).view(numpy_dtype(name)).astype(np.float32)
    first, second = np.meshgrid(values, values, indexing="xy")  # little endian: the first is in the low byte
    return np.stack([first, second], axis=-1).reshape(-1, 2).copy().view(np.uint64).reshape(-1)


def as_float32(data: RawArray, dtype: DType) -> RawArray:
    """Return raw elements of a small dtype as float32, exactly."""
    if dtype.name == "int8":
        return data.view(np.int8).astype(np.float32)
    if dtype.bytes == 1 and data.size % 2 == 0:
        pairs = _float8_pairs(dtype.name)[np.ascontiguousarray(data).reshape(-1).view("<u2")]
        return np.asarray(pairs.view(np.float32).reshape(data.shape))
    return data.view(numpy_dtype(dtype.name)).astype(np.float32)
