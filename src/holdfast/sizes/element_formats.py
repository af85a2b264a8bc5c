"""Element formats of tensors in memory, with the scales that quantized ones need. Sizes are counted in bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A format of elements. Quantized ones have a scale of `scale_bits` for each `block` of elements.

    A size of 0 in `block` stands for the whole dim. `tensor_bits` are kept once for each tensor. `block` counts from
    the last dim; dims before it are not blocked.
    """

    name: str
    bits: int
    dtype: str = ""  # the name of the dtype, for formats without scales
    block: tuple[int, ...] = ()
    scale_bits: int = 0
    tensor_bits: int = 0

    @property
    def stored(self) -> DType:
        """The dtype of a tensor file; raises InvalidArgument for a quantized format."""
        if not self.dtype:
            raise InvalidArgument(f"{self.name} is a format of copies for computation: choose fp32, bf16 or fp16")
        return dtype_named(self.dtype)

    def bits_of(self, boxes: Sequence[Box], shape: Sequence[int]) -> int:
        """Return the bits of these boxes of a tensor, with the scales of the blocks that they touch."""
        elements = sum(box.volume for box in boxes)
        if not elements:
            return 0
        scales = sum(self._blocks(box, shape) for box in boxes) if self.scale_bits else 0
        return elements * self.bits + scales * self.scale_bits + self.tensor_bits

    def _blocks(self, box: Box, shape: Sequence[int]) -> int:
        """Return how many blocks a box touches; 0 for an empty box."""
        if not box.volume:
            return 0
        sizes = (1,) * (len(shape) - len(self.block)) + self.block[-len(shape) :]
        counts = []
        for offset, size, block, whole in zip(box.offsets, box.sizes, sizes, shape, strict=True):
            step = block or whole
            counts.append((offset + size - 1) // step - offset // step + 1)
        return math.prod(counts)


_FORMATS = (
    ElementFormat("fp64", 64, "float64"),
    ElementFormat("fp32", 32, "float32"),
    ElementFormat("bf16", 16, "bfloat16"),
    ElementFormat("fp16", 16, "float16"),
    ElementFormat("fp8", 8, tensor_bits=32),
    ElementFormat("fp8-row", 8, block=(1, 0), scale_bits=32),
    ElementFormat("fp8-block128", 8, block=(128, 128), scale_bits=32),
    ElementFormat("mxfp8", 8, block=(1, 32), scale_bits=8),
    ElementFormat("mxfp4", 4, block=(1, 32), scale_bits=8),
    ElementFormat("nvfp4", 4, block=(1, 16), scale_bits=8, tensor_bits=32),
)
_BY_NAME = {each.name: each for each in _FORMATS}
_LONG = {each.dtype: each for each in _FORMATS if each.dtype}
PLAIN = tuple(each.name for each in _FORMATS if each.dtype)
FORMATS = tuple(_BY_NAME)


def format_named(name: str, option: str) -> ElementFormat:
    """Return a format by its name, such as "bf16" or "bfloat16"; `option` is named in the error."""
    text = str(name).removeprefix("torch.")
    found = _BY_NAME.get(text) or _LONG.get(text)
    if found is None:
        raise InvalidArgument(f"{option}={name!r}: choose one of {', '.join(FORMATS)}")
    return found


def plain_format(name: str, option: str) -> ElementFormat:
    """Return a format without scales by its name."""
    found = format_named(name, option)
    if not found.dtype:
        raise InvalidArgument(f"{option}={name!r}: choose one of {', '.join(PLAIN)}")
    return found


def format_of(dtype: DType) -> ElementFormat:
    """Return the format of a stored dtype: its bits, without scales."""
    return ElementFormat(dtype.name, dtype.bits * (2 if dtype.pair else 1), dtype.name)
