"""Tensors as shards: DTensors, plain tensors and flat shards to boxes and raw arrays; overlaps, fingerprints.

A DTensor carries its layout. A plain tensor is a full replica. A flat shard is a contiguous
range of a tensor's elements in a 1-d buffer. Elements at the same address are found here too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as TorchShard

from holdfast.adapters.weight_wrappers import PLAIN, local_tensor
from holdfast.core.errors import LayoutError, Unsupported
from holdfast.format.digest import digest_hex
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box, flat_boxes
from holdfast.layout.placement import (
    Boxes,
    Mesh,
    OnMesh,
    Placement,
    RankLayout,
    Replicate,
    Shard,
    ShardBox,
    StridedShard,
    Whole,
    local_shape,
    shard_boxes,
)
from holdfast.plan.files import RawArray, bytes_of

_STRIDED = torch.strided
RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes


def tensor_overlaps(tensor: torch.Tensor) -> bool:
    """Return True if several elements of a strided tensor share an address, as in an expanded tensor."""
    return not tensor.is_contiguous() and _overlaps(tuple(tensor.shape), tensor.stride())


def array_overlaps(array: np.ndarray[Any, Any]) -> bool:
    """Return True if several elements of a numpy array share memory, as after np.broadcast_to."""
    return not array.flags.c_contiguous and _overlaps(array.shape, array.strides, array.itemsize)


def _overlaps(shape: Sequence[int], strides: Sequence[int], item: int = 1) -> bool:
    """Return True if elements of `item` units at these strides overlap."""
    if 0 in shape:
        return False
    steps = sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    reach = item
    for stride, size in steps:
        if stride < reach:
            return stride < item or _covers_twice(steps, item)
        reach += stride * (size - 1)
    return False


def _covers_twice(steps: Sequence[tuple[int, int]], item: int) -> bool:
    """Decide by counting the covered units, for strides that alone do not decide."""
    extent = item + sum(stride * (size - 1) for stride, size in steps)
    units = np.zeros(extent, dtype=bool)
    sizes, strides = tuple(size for _, size in steps), tuple(stride for stride, _ in steps)
    np.lib.stride_tricks.as_strided(units, (*sizes, item), (*strides, 1))[...] = True
    return int(np.count_nonzero(units)) != int(np.prod(sizes)) * item


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a strided tensor and the address past its last element."""
    if not tensor.numel():
        return 0, 0
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """A contiguous range of a tensor's elements in row-major order, held in a 1-d buffer.

    `param` is the parameter itself or its key. `state` is the name of the optimizer state, or "master"
    for fp32 master weights. `shape` is the global shape, and `start` is the index of the first element.
    `tensor` is the contiguous buffer. A 0-d state such as a step count has shape () and is a replica
    on every rank that reports it.
    """

    param: torch.Tensor | str
    state: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LikeShard:
    """A local tensor sharded like another tensor; its device and dtype may differ."""

    like: torch.Tensor
    tensor: torch.Tensor


@dataclass(slots=True, eq=False)  # not frozen: each save makes one per tensor, and frozen ones take twice as long
class Holder:
    """A tensor as one rank holds it: global shape, held parts, layout over the ranks, local tensor."""

    logical: DType
    shape: tuple[int, ...]
    parts: tuple[ShardBox, ...]
    local: torch.Tensor
    how: RankLayout

    @property
    def stored(self) -> DType:
        return dtype_named(self.logical.stored)


Layout = tuple[DType, tuple[int, ...], tuple[ShardBox, ...], RankLayout]


class Holders:
    """A cache of tensor layouts, valid from save to save while the tensors keep their memory.

    Holds only weak references to tensors.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], tuple[Any, ...], Layout]] = {}

    def of(self, value: torch.Tensor | FlatShard | LikeShard, where: str) -> Holder:
        """Return `holder_of(value, where)`, from the cache if the tensor is unchanged."""
        if isinstance(value, FlatShard | LikeShard):
            return holder_of(value, where)
        inner = value if type(value) in PLAIN else local_tensor(value)
        memory = memory_of(value)
        if memory is None:
            return holder_of(value, where)  # without an address; raises for a tensor that cannot be stored
        address = memory[0]
        known = self._known.get(id(value))
        if known is not None and known[0]() is value and known[1] == memory:
            logical, shape, parts, how = known[2]
            return Holder(logical, shape, parts, without_grad(inner), how)
        holder = holder_of(value, where)
        if address and holder.local.data_ptr() == address and holder.local.dtype == inner.dtype:
            layout = (holder.logical, holder.shape, holder.parts, holder.how)
            number = id(value)
            gone = weakref.ref(value, lambda gone: self._forget(number, gone))
            self._known[number] = (gone, memory, layout)
        return holder

    def _forget(self, number: int, gone: weakref.ref[torch.Tensor]) -> None:
        if number in self._known and self._known[number][0] is gone:
            del self._known[number]


def without_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor outside of autograd; detach only if needed, since detaching dominates a cached save."""
    return tensor.detach() if tensor.requires_grad else tensor


def memory_of(value: torch.Tensor) -> tuple[Any, ...] | None:
    """Return everything that determines a tensor's bytes; None for a tensor without its own address.

    While the result is equal for one tensor object, its layout is unchanged. The address alone is not enough:
    `.data =` changes everything else, and an allocator reuses freed memory for the next tensor.
    """
    inner, spec = value, None
    if type(value) not in PLAIN:
        inner, spec = local_tensor(value), value._spec if isinstance(value, DTensor) else None
    if inner.is_meta or inner.layout is not _STRIDED or inner.is_nested or inner.is_quantized:
        return None
    dtype = inner.dtype
    # The negative bit of a real tensor can be omitted: reading such bytes raises.
    signs = dtype.is_complex and (inner.is_conj(), inner.is_neg())
    return inner.data_ptr(), dtype, inner.shape, inner.stride(), inner.device, signs, spec, type(value)


def has_memory(value: Any, memory: tuple[Any, ...]) -> bool:
    """Return True if `memory_of` a tensor is unchanged. A hot path: every save checks every tensor."""
    address, dtype, shape, stride, device, signs, spec, kind = memory
    if type(value) is not kind:
        return False
    inner: torch.Tensor = value if kind in PLAIN else local_tensor(value)
    return (
        inner.data_ptr() == address
        and inner.dtype is dtype
        and inner.shape == shape
        and inner.stride() == stride
        and inner.device == device
        and (not signs or signs == (inner.is_conj(), inner.is_neg()))
        and (spec is None or value._spec == spec)
    )


def holder_of(value: torch.Tensor | FlatShard | LikeShard, where: str, *, allow_meta: bool = False) -> Holder:
    """Return how this rank holds a tensor; raises Unsupported for a tensor that cannot be stored.

    With `allow_meta` the local tensor may be on the meta device: the layout is that of the tensor in memory.
    """
    if isinstance(value, FlatShard):
        return _flat_holder(value, where)
    if isinstance(value, LikeShard):
        like = holder_of(value.like, where, allow_meta=True)
        local = _storable(value.tensor.detach(), where, allow_meta)
        return Holder(_dtype_of(value.tensor, where), like.shape, like.parts, local, like.how)
    value = value.detach()
    if isinstance(value, DTensor):
        return _dtensor_holder(value, where, allow_meta)
    inner = value if type(value) in PLAIN else local_tensor(value)
    local = _storable(inner, where, allow_meta)
    logical = _dtype_of(value, where)
    shape = tuple(local.shape)
    return Holder(logical, shape, (ShardBox(Box.full(shape), Box.full(shape)),), local, Whole())


def _dtype_of(tensor: torch.Tensor, where: str) -> DType:
    try:
        return dtype_named(str(tensor.dtype).removeprefix("torch."))
    except Unsupported as error:
        raise Unsupported(f"{where}: {error}") from None


def _storable(tensor: torch.Tensor, where: str, allow_meta: bool = False) -> torch.Tensor:
    """Return the local tensor as the format stores it: complex numbers as pairs, packed bits as bytes."""
    if tensor.is_meta and not allow_meta:
        raise Unsupported(f"{where} is on the meta device: it has no values to save or load")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise Unsupported(f"{where}: {kind} tensors and quantized dtypes cannot be stored")
    if type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        raise Unsupported(
            f"{where}: the tensor subclass {type(tensor).__name__} cannot be stored here; it can as a parameter or "
            "buffer, as the state of an optimizer, or in a dict of tensors"
        )
    if tensor.numel() and not tensor.is_meta and not tensor.data_ptr():
        raise Unsupported(
            f"{where}: the {type(tensor).__name__} of shape {list(tensor.shape)} has no memory: its storage was "
            "freed, or it is a placeholder for other tensors"
        )
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in (torch.complex128, torch.complex32):
        return torch.view_as_real(tensor)
    if tensor.dtype == torch.float4_e2m1fn_x2:
        return tensor.view(torch.uint8)
    return tensor


def _with_pair(box: Box) -> Box:
    return Box((*box.offsets, 0), (*box.sizes, 2))


def _paired(parts: tuple[ShardBox, ...]) -> tuple[ShardBox, ...]:
    return tuple(ShardBox(_with_pair(part.box), _with_pair(part.local)) for part in parts)


def _dtensor_holder(value: DTensor, where: str, allow_meta: bool) -> Holder:
    local = local_tensor(value.to_local())
    logical = _dtype_of(local, where)
    shape = tuple(value.shape)
    parts, how = dtensor_parts(value, where)
    if logical.pair:
        shape, parts = (*shape, 2), _paired(parts)
        how = Boxes(tuple(part.box for part in parts))
    return Holder(logical, shape, parts, _storable(local, where, allow_meta), how)


def dtensor_parts(value: DTensor, where: str) -> tuple[tuple[ShardBox, ...], RankLayout]:
    """Return the parts of a DTensor that this rank holds, and their layout over the ranks of its mesh."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (), Boxes(())
    shape, local = tuple(value.shape), tuple(value._local_tensor.shape)
    placements = [_placement(placement, where) for placement in value.placements]
    parts, right_to_left = _matching_parts(shape, tuple(mesh.shape), placements, coordinate, local, where)
    return parts, OnMesh(mesh_of(mesh), tuple(placements), right_to_left)


@functools.lru_cache(maxsize=32)
def mesh_of(device_mesh: Any) -> Mesh:
    """Convert a torch DeviceMesh to a Mesh; unnamed axes are numbered."""
    axes = device_mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(device_mesh.ndim))
    return Mesh(tuple(axes), tuple(device_mesh.shape), tuple(device_mesh.mesh.flatten().tolist()))


def _matching_parts(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    placements: list[Placement],
    coordinate: Sequence[int],
    local: tuple[int, ...],
    where: str,
) -> tuple[tuple[ShardBox, ...], bool]:
    """Return the parts that fit the local shape, and whether strided shards were read right to left."""
    for right_to_left in (True, False):
        parts = shard_boxes(shape, sizes, placements, coordinate, right_to_left=right_to_left)
        expected = local_shape(parts, len(shape))
        if expected == local or (expected is None and 0 in local):
            return parts, right_to_left
    raise LayoutError(
        f"{where}: the local tensor has shape {list(local)}, which does not match shape {list(shape)} with "
        f"{placements} on a mesh of {list(sizes)} at coordinate {list(coordinate)}"
    )


def _placement(placement: Any, where: str) -> Placement:
    if isinstance(placement, Partial):
        raise Unsupported(f"{where} has a Partial placement and so no single value; reduce it before saving")
    if placement.is_replicate():
        return Replicate()
    factor = getattr(placement, "split_factor", None)
    if factor is not None:
        return StridedShard(placement.dim, int(factor))
    if isinstance(placement, TorchShard):
        return Shard(placement.dim)
    raise Unsupported(f"{where} has the unknown placement {placement}")


def _flat_holder(shard: FlatShard, where: str) -> Holder:
    shape = tuple(shard.shape)
    logical = _dtype_of(shard.tensor, where)
    if logical.pair:
        raise Unsupported(f"{where}: flat shards of {logical.name} cannot be stored")
    local = _storable(shard.tensor.detach().reshape(-1), where)
    if local.numel() and local.data_ptr() != shard.tensor.data_ptr():
        raise Unsupported(f"{where}: the buffer of a flat shard must be contiguous")
    try:
        boxes = flat_boxes(shape, shard.start, shard.start + local.numel())
    except ValueError as error:
        raise LayoutError(f"{where}: {error}") from None
    parts = []
    at = 0
    for box in boxes:
        parts.append(ShardBox(box, Box((at,), (box.volume,))))
        at += box.volume
    return Holder(logical, shape, tuple(parts), local, Boxes(tuple(boxes)))


def part_view(holder: Holder, part: ShardBox) -> torch.Tensor:
    """Return a view of the local tensor with the sizes of the part's box."""
    view = holder.local
    if part.local.sizes == part.box.sizes == view.shape:
        return view
    if holder.local.ndim == len(part.local.sizes):
        for dim, (offset, size) in enumerate(zip(part.local.offsets, part.local.sizes, strict=True)):
            if (offset, size) != (0, view.shape[dim]):
                view = view.narrow(dim, offset, size)
    return view.view(part.box.sizes) if tuple(view.shape) != part.box.sizes else view


def raw_array(tensor: torch.Tensor) -> RawArray:
    """View a CPU tensor as an array of unsigned integers of the same element size, without a copy."""
    raw = tensor.view(RAW_DTYPES[tensor.element_size()]).numpy()
    return raw.view(np.dtype(f"u{tensor.element_size()}"))


def fingerprint(tensor: torch.Tensor) -> str:
    """Return a string that equal tensors share: a digest on the CPU, two checksums on a device."""
    if tensor.device.type == "cpu":
        return digest_hex(bytes_of(raw_array(tensor.contiguous())))
    # A single element counts as contiguous whatever its stride, but cannot be viewed as bytes.
    bits = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    # Work in slices: the weights and int64 values would otherwise take sixteen times the tensor's memory.
    for begin in range(0, bits.numel(), 1 << 24):
        part = bits[begin : begin + (1 << 24)].to(torch.int64)
        weights = torch.arange(begin + 1, begin + 1 + part.numel(), device=tensor.device) * 0x9E3779B1
        total[0] += part.sum()
        total[1] += (part * weights).sum()
    return ":".join(f"{value & (2**64 - 1):x}" for value in total.tolist())
