"""Block-quantized tensors on a mesh: the boxes of codes and scales that belong to the elements a rank holds.

torchao's optimizer states quantize blocks of consecutive elements of the local shard. Where the blocks of every
shard are those of the whole tensor, codes and scales can be sharded and resharded like the tensor itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapters.tensors import Holder, holder_of
from holdfast.layout.box import Box
from holdfast.layout.placement import Boxes, OnMesh, RankLayout, ShardBox, Whole

# By class of torchao: the inner tensors that are the same for all elements. All others are one value for every few
# consecutive elements.
BLOCK_CLASSES = {"OptimState8bit": ("qmap",), "OptimState4bit": ("qmap",), "OptimStateFp8": ()}


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayout:
    """A block-quantized local tensor, and the shape of the whole tensor that it is a shard of."""

    local: Any
    shape: tuple[int, ...]
    constants: tuple[str, ...]

    @property
    def block(self) -> int:
        """The number of elements of a block."""
        return int(self.local.block_size)

    def context(self) -> dict[str, Any]:
        """Return what a load compares, independent of the shard."""
        signed = getattr(self.local, "signed", None)
        return {"block_size": self.block} | ({} if signed is None else {"signed": bool(signed)})

    def tensor(self, name: str) -> torch.Tensor:
        inner: torch.Tensor = getattr(self.local, name)
        return inner

    def is_aligned(self, how: RankLayout) -> bool:
        """Return True if the blocks of every rank's shard are blocks of the whole tensor."""
        if isinstance(how, OnMesh):
            return _is_aligned(self.shape, self.block, how)
        return _are_blocks(self.shape, self.block, tuple(how.boxes(self.shape, (0,))))

    def whole(self) -> dict[str, Holder]:
        """Return how a rank holds the inner tensors of a tensor that is not sharded."""
        full = Box.full(self.shape)
        return {name: self._holder(name, (ShardBox(full, full),), Whole()) for name in self._names}

    def boxes(self, parts: Sequence[ShardBox]) -> dict[str, Holder]:
        """Return how a rank holds the inner tensors if it holds `parts` of the tensor."""
        return {name: self._holder(name, parts, None) for name in self._names}

    @property
    def _names(self) -> list[str]:
        return list(self.local.__tensor_flatten__()[0])

    def _holder(self, name: str, parts: Sequence[ShardBox], how: RankLayout | None) -> Holder:
        inner = holder_of(self.tensor(name), name)
        if name in self.constants:
            return inner
        ratio = self.local.numel() // inner.local.numel()
        shape = _inner_shape(self.shape, self.block, ratio)
        placed = tuple(self._part(part, inner, ratio, shape) for part in parts)
        return Holder(inner.logical, shape, placed, inner.local, how or Boxes(tuple(part.box for part in placed)))

    def _part(self, part: ShardBox, inner: Holder, ratio: int, shape: tuple[int, ...]) -> ShardBox:
        """Return the box of an inner tensor that belongs to a box of elements."""
        if shape == self.shape:
            box = part.box
        elif len(shape) == len(self.shape):
            box = Box(
                (*part.box.offsets[:-1], part.box.offsets[-1] // ratio),
                (*part.box.sizes[:-1], part.box.sizes[-1] // ratio),
            )
        else:
            box = Box((part.box.flat_offset(self.shape) // ratio,), (part.box.volume // ratio,))
        if ratio == 1 and inner.local.ndim == len(part.local.sizes):
            return ShardBox(box, part.local)
        start = part.local.flat_offset(tuple(self.local.shape)) // ratio
        return ShardBox(box, Box((start,), (box.volume,)))


def block_layout(local: Any, shape: tuple[int, ...] | None = None) -> BlockLayout | None:
    """Return the blocks of a local tensor, a shard of a tensor of `shape`; None for a class without such blocks."""
    kind = type(local)
    constants = BLOCK_CLASSES.get(kind.__name__) if kind.__module__.partition(".")[0] == "torchao" else None
    if constants is None or not local.numel():
        return None
    shape = tuple(local.shape) if shape is None else shape
    known = isinstance(getattr(local, "block_size", None), int) and local.block_size > 0
    names = [] if not known else [name for name in local.__tensor_flatten__()[0] if name not in constants]
    counts = [getattr(local, name).numel() for name in names]
    if not counts or any(not count or local.numel() % count for count in counts):
        return None  # a version of torchao that keeps something else
    if any(local.block_size % (local.numel() // count) for count in counts):
        return None
    return BlockLayout(local, shape, constants)


def _inner_shape(shape: tuple[int, ...], block: int, ratio: int) -> tuple[int, ...]:
    """Return the stored shape of an inner tensor with a value for each `ratio` elements.

    It follows from the whole tensor alone. Rows of whole blocks keep their dims, so that any dim may be sharded.
    """
    if ratio == 1:
        return shape
    if shape[-1] % block == 0:
        return (*shape[:-1], shape[-1] // ratio)
    return (math.prod(shape) // ratio,)


@functools.lru_cache(maxsize=4096)
def _is_aligned(shape: tuple[int, ...], block: int, how: OnMesh) -> bool:
    return _are_blocks(shape, block, tuple(how.boxes(shape, how.mesh.ranks)))


def _are_blocks(shape: tuple[int, ...], block: int, held: Sequence[tuple[int, Box]]) -> bool:
    columns: dict[int, set[Box]] = {}
    for rank, box in held:
        columns.setdefault(rank, set()).add(Box(box.offsets[1:], box.sizes[1:]))
    if any(len(found) > 1 for found in columns.values()):
        return False  # the boxes of a rank are not contiguous in its local tensor
    if shape[-1] % block == 0:
        return all(box.offsets[-1] % block == 0 and box.sizes[-1] % block == 0 for _, box in held)
    if math.prod(shape) % block:
        return False
    return all(
        box.is_contiguous_in(shape) and box.flat_offset(shape) % block == 0 and box.volume % block == 0
        for _, box in held
    )
