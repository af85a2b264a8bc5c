"""Small collectives that handlers need, over the mesh axes that they name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import is_shard

ALL_GATHER = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # older torch has no other


def reduced(tensor: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int], how: str = "sum") -> torch.Tensor:
    """The sum (or "max", "min") of every rank's tensor along mesh axes, on each of them."""
    result = tensor.contiguous()
    for axis in axes:
        if mesh.size(axis) > 1:
            result = functional.all_reduce(result, how, (mesh, axis))
            if isinstance(result, functional.AsyncCollectiveTensor):
                result = result.wait()
    return result


WORDS = {8: torch.int64, 4: torch.int32}  # integers as long as floats


def extreme_of(tensor: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int], largest: bool) -> torch.Tensor:
    """The largest or smallest of every rank's tensor; a NaN wins, which collectives forget.

    Floats are sent as integers of the same order, among which what stands for NaN is the last or the first.
    """
    how = "max" if largest else "min"
    if not tensor.dtype.is_floating_point:
        return reduced(tensor, mesh, axes, how)
    wide = tensor if tensor.element_size() in WORDS else tensor.to(torch.float32)
    kind = WORDS[wide.element_size()]
    nothing = torch.iinfo(kind).max if largest else torch.iinfo(kind).min
    bits = torch.where(wide.isnan(), nothing, _turned(wide.contiguous().view(kind)))
    return _turned(reduced(bits, mesh, axes, how)).view(wide.dtype).to(tensor.dtype)


def _turned(bits: torch.Tensor) -> torch.Tensor:
    """The bits of floats as integers of the same order, and back: those of negative ones count backwards."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def sharded_axes(placements: Sequence[Placement], dims: Iterable[int] | None = None) -> list[int]:
    """The mesh axes that shard a tensor (along one of `dims`)."""
    wanted = None if dims is None else set(dims)
    return [
        axis
        for axis, placement in enumerate(placements)
        if is_shard(placement) and (wanted is None or placement.dim in wanted)
    ]


def has_empty_shard(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Whether some rank's shard of a tensor of `shape` is empty though the tensor is not."""
    for dim, size in enumerate(shape):
        axes = sharded_axes(placements, (dim,))
        if type(size) is not int:  # symbolic, in a trace
            ranks = math.prod(mesh.size(axis) for axis in axes)
            if axes and private.is_known_true(-(-size // ranks) * (ranks - 1) >= size):
                return True
            continue
        sizes = {size}
        for axis in axes:
            sizes = {part for whole in sizes for part in chunk_sizes(whole, mesh.size(axis))}
        if size and 0 in sizes:
            return True
    return False


def has_even_shards(tensor: DTensor) -> bool:
    """Whether every rank has as much as every other, and no part is a sum."""
    sizes = list(tensor.shape)
    for axis, place in enumerate(tensor.placements):
        if place.is_replicate():
            continue
        ranks = tensor.device_mesh.size(axis)
        if not is_shard(place) or not sizes[place.dim] or sizes[place.dim] % ranks:
            return False
        sizes[place.dim] //= ranks
    return True


def largest_part(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    """How many numbers of a tensor of `shape` the rank with the most of them has."""
    sizes = list(shape)
    for axis, placement in enumerate(placements):
        if is_shard(placement):
            sizes[placement.dim] = -(-sizes[placement.dim] // mesh.size(axis))
    return math.prod(sizes)


def chunk_sizes(size: int, ranks: int) -> list[int]:
    """The lengths of the shards of a dim."""
    step = -(-size // ranks)
    return [max(0, min(step, size - step * place)) for place in range(ranks)]


def gathered(tensor: torch.Tensor, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    """Every rank's tensor along one mesh axis, stacked in the order of the ranks; all must have one shape."""
    result = ALL_GATHER(tensor.contiguous().unsqueeze(0), 0, (mesh, axis))
    return result.wait() if isinstance(result, functional.AsyncCollectiveTensor) else result
