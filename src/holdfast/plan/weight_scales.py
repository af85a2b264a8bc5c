"""Weights that are stored as small numbers times scales: which scale belongs to which weight, and to which elements.

A weight is fp8 or int8. Its scales are one number (per tensor), one for each row (per channel), or one for each block,
as DeepSeek stores them. The value of an element is its number times its scale, whatever the scale's key says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Mismatch, Unsupported
from holdfast.plan.files import TensorSpec
from holdfast.plan.quantized_keys import Quantized, is_float8, quantized_weights

BLOCK = 128
_SCALES = ("_scale_inv", "_scale")
_ACTIVATION = re.compile(r".*(?:input|output|activation)_scale(?:_ub|_inv)?")
_CACHE = re.compile(r"(?:.*\.)?(?:q|k|v)_scale|(?:.*\.)?kv_cache_scale")
_SCALE_DTYPES = frozenset({"float32", "bfloat16", "float16", "float8_e8m0fnu"})


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A weight, the key of its scales, and the rows and columns that share a scale.

    `unused` are the keys of scales of activations, which are not needed for the values of the weight.
    """

    weight: str
    dtype: str
    scale: str
    scale_dtype: str
    scheme: str  # "tensor", "channel" or "block"
    block: tuple[int, int]
    unused: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The scales in a few words."""
        per = f"per block of {self.block[0]}x{self.block[1]}" if self.scheme == "block" else f"per {self.scheme}"
        return f"times a {self.scale_dtype} scale {per}"


Specs = Mapping[str, TensorSpec]


def scaled_weights(
    specs: Specs, block: tuple[int, int] | None = None
) -> tuple[dict[str, ScaledWeight], dict[str, Exception]]:
    """Return the weights with scales by key, and the reason for every quantized weight that is not one of them.

    `block` is the block size that the model's config states.
    """
    found: dict[str, ScaledWeight] = {}
    problems: dict[str, Exception] = {}
    quantized = quantized_weights({key: spec.dtype.name for key, spec in specs.items()})
    for key, weight in quantized.items():
        try:
            found[key] = _scaled(weight, specs, block)
        except (Mismatch, Unsupported) as problem:
            problems[key] = problem
    scales = {scaled.scale for scaled in found.values()} | {key for w in quantized.values() for key in w.companions}
    for key, spec in specs.items():
        if is_float8(spec.dtype.name) and key not in quantized and key not in scales:
            problems[key] = Mismatch(
                f"{key!r} is {spec.dtype.name}, but neither {key + _SCALES[0]!r} nor {key + _SCALES[1]!r} is there: "
                "the value of the weight is unknown without its scales"
            )
        elif key.endswith(("_scale_inv", "weight_scale")) and key not in scales:
            problems[key] = Mismatch(f"{key!r} is there, but no quantized weight to which it belongs")
    return found, problems


def cache_scales(specs: Specs) -> list[str]:
    """Return the keys of scales of the attention's cache, which belong to no weight."""
    return [key for key, spec in specs.items() if _CACHE.fullmatch(key) and math.prod(spec.shape) == 1]


def stated_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block size that a quantization config states, None without one."""
    value = config.get("weight_block_size")
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    return None


def _scaled(weight: Quantized, specs: Specs, block: tuple[int, int] | None) -> ScaledWeight:
    spec = specs[weight.weight]
    if weight.is_packed:
        raise Unsupported(f"{weight.what}: packed numbers, which Holdfast does not unpack")
    scale = next((weight.weight + end for end in _SCALES if weight.weight + end in weight.companions), None)
    if scale is None:
        raise Mismatch(f"{weight.what}, but {weight.weight + _SCALES[0]!r} or {_SCALES[1]!r} is missing")
    others = [key for key in weight.companions if key != scale]
    unknown = [key for key in others if not _ACTIVATION.fullmatch(key)]
    if unknown:
        raise Unsupported(f"{weight.what}: Holdfast cannot apply {unknown[0]!r}")
    scale_spec = specs[scale]
    if scale_spec.dtype.name not in _SCALE_DTYPES:
        raise Unsupported(f"{scale!r} is {scale_spec.dtype.name}; scales are {', '.join(sorted(_SCALE_DTYPES))}")
    if len(spec.shape) not in (2, 3):
        raise Unsupported(f"{weight.what}: it has {len(spec.shape)} dims, expected 2, or 3 for stacked experts")
    blocks_first = scale.endswith(_SCALES[0])
    scheme = _scheme(spec.shape, scale_spec.shape, block or (BLOCK, BLOCK), blocks_first=blocks_first)
    if scheme is None:
        raise _other_shape(spec, scale_spec, block)
    name, size = scheme
    return ScaledWeight(weight.weight, spec.dtype.name, scale, scale_spec.dtype.name, name, size, tuple(sorted(others)))


def _scheme(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int], *, blocks_first: bool
) -> tuple[str, tuple[int, int]] | None:
    """Return the kind of scales and the elements that share one, from the shapes of a weight and its scales.

    One scale may be that of the only block of a small weight: `blocks_first` decides.
    """
    outer, (rows, columns) = shape[:-2], shape[-2:]
    is_blocks = scales == (*outer, math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if is_blocks and blocks_first:
        return "block", block
    if math.prod(scales) == 1:
        return "tensor", (max(1, rows), max(1, columns))
    if scales in ((*outer, rows, 1), (rows,)) and (len(scales) > 1 or not outer):
        return "channel", (1, max(1, columns))
    return ("block", block) if is_blocks else None


def _other_shape(weight: TensorSpec, scale: TensorSpec, block: tuple[int, int] | None) -> Mismatch:
    rows, columns = weight.shape[-2:]
    size = block or (BLOCK, BLOCK)
    blocks = [*weight.shape[:-2], math.ceil(rows / size[0]), math.ceil(columns / size[1])]
    return Mismatch(
        f"{scale.key!r} has the shape {list(scale.shape)}, which does not fit {weight.key!r} with "
        f"{list(weight.shape)}: expected one scale, {[*weight.shape[:-1], 1]} for channels, or {blocks} for blocks of "
        f"{size[0]}x{size[1]}"
    )
