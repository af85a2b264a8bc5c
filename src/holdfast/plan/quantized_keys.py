"""Quantized weights (fp8, GPTQ, AWQ, bitsandbytes, mxfp4) and the keys of their scales, found by key and dtype.

fp8 weights come with `weight_scale_inv` or `weight_scale`. GPTQ and AWQ store a packed `qweight` with `scales` and
`qzeros`. bitsandbytes stores `absmax` and `quant_map` under the weight's key. mxfp4 splits a weight into `_blocks`
and `_scales`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

_FLOAT8 = "float8_"
_PACKED = frozenset({"int8", "uint8", "int32", "uint32", "float4_e2m1fn_x2"})
_COMPANION_ENDINGS = (
    *("_scale_inv", "_scale", "_scales", "_scale_2", "_zero_point", "_global_scale", "_zeros", "_g_idx", "_shape"),
    *("._scale", "._shift", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", "_format"),
)
_STATE = re.compile(r"(?P<base>.+)\.quant_state\.[A-Za-z0-9_]+")
_IN_LAYER = {
    "weight": ("input_scale", "output_scale", "activation_scale", "input_scale_ub", "SCB", "weight_format", "scale"),
    "qweight": ("qzeros", "scales", "g_idx", "bias_scale"),
    "weight_packed": ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
    "W_q": ("scale", "zero", "meta"),
    "codes": ("codebooks", "scales"),
}
_BLOCKS = ("_blocks", "_scales")
_SCALE = re.compile(r".*(?:_scale_inv|_scales?)")


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized weight, the keys of its scales and other companions, and its dtype."""

    weight: str
    companions: tuple[str, ...]
    dtype: str

    @property
    def is_packed(self) -> bool:
        """True if several numbers share an element, so that the dims are not those of the weight."""
        return not self.dtype.startswith(_FLOAT8) and self.dtype != "int8"

    def block_scales(self) -> list[str]:
        """Return the keys that may hold a scale for each block of the weight."""
        own = self.weight
        return [key for key in self.companions if key.startswith(own) and _SCALE.fullmatch(key) and not self.is_packed]

    @property
    def what(self) -> str:
        return f"{self.weight!r} is {self.dtype}, quantized, stored with {', '.join(map(repr, self.companions[:3]))}"


def quantized_weights(dtypes: Mapping[str, str]) -> dict[str, Quantized]:
    """Return the quantized weights of a model by key, given the dtypes of all its keys."""
    companions: dict[str, list[str]] = {}
    for key in dtypes:
        for weight in _weights_of(key, dtypes):
            companions.setdefault(weight, []).append(key)
    return {
        weight: Quantized(weight, tuple(sorted(keys)), dtypes[weight])
        for weight, keys in companions.items()
        if dtypes[weight].startswith(_FLOAT8) or dtypes[weight] in _PACKED
    }


def is_float8(dtype: str) -> bool:
    """Return True for an 8-bit float, which usually comes with scales."""
    return dtype.startswith(_FLOAT8)


def relation(weight: str, key: str) -> tuple[str, str] | None:
    """Return (ending removed, ending added) that turn a weight's key into the companion `key`, or None."""
    if weight.endswith(_BLOCKS[0]) and key == weight.removesuffix(_BLOCKS[0]) + _BLOCKS[1]:
        return _BLOCKS
    if key.startswith(weight):
        return "", key.removeprefix(weight)
    layer, _, name = weight.rpartition(".")
    prefix = f"{layer}." if layer else ""
    return (name, key.removeprefix(prefix)) if key.startswith(prefix) else None


def _weights_of(key: str, keys: Collection[str]) -> Iterator[str]:
    """Yield the present weights that a key may belong to."""
    state = _STATE.fullmatch(key)
    candidates = [state["base"]] if state else []
    candidates += [key.removesuffix(ending) for ending in _COMPANION_ENDINGS if key.endswith(ending)]
    if key.endswith(_BLOCKS[1]):
        candidates.append(key.removesuffix(_BLOCKS[1]) + _BLOCKS[0])
    layer, _, name = key.rpartition(".")
    prefix = f"{layer}." if layer else ""
    candidates += [f"{prefix}{weight}" for weight, names in _IN_LAYER.items() if name in names]
    yield from (weight for weight in dict.fromkeys(candidates) if weight in keys and weight != key)
