"""Sizes of the shards of a dim, the mesh axes that make them, and tests for even, uneven and empty shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from holdfast.spmd.base.torch_modes import is_known_true


def is_shard(place: object) -> TypeGuard[Shard]:
    """Return True for a plain Shard; a strided shard, which some versions derive from Shard, has no box."""
    return type(place) is Shard


def sharded_dim(place: Placement) -> int | None:
    """Return the dim that a placement shards, strided or not; None for a replica or a Partial."""
    return None if place.is_replicate() or place.is_partial() else place.dim  # type: ignore[attr-defined]


def longest_shard(tensor: DTensor, dim: int, placements: Sequence[Placement] | None = None) -> int:
    """Return the length of the longest shard of a dim, to which the others are padded when gathered."""
    size = int(tensor.shape[dim])
    for axis in sharded_axes(tensor.placements if placements is None else placements, (dim,)):
        size = -(-size // tensor.device_mesh.size(axis))
    return size


def sharded_axes(placements: Sequence[Placement], dims: Iterable[int] | None = None) -> list[int]:
    """Return the mesh axes that shard a tensor (along one of `dims`)."""
    wanted = None if dims is None else set(dims)
    return [
        axis
        for axis, placement in enumerate(placements)
        if is_shard(placement) and (wanted is None or placement.dim in wanted)
    ]


def has_empty_shard(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Return True if some rank's shard of a tensor of `shape` is empty though the tensor is not."""
    for dim, size in enumerate(shape):
        axes = sharded_axes(placements, (dim,))
        if type(size) is not int:  # a symbolic size, in a trace
            ranks = math.prod(mesh.size(axis) for axis in axes)
            if axes and is_known_true(-(-size // ranks) * (ranks - 1) >= size):
                return True
            continue
        sizes = {size}
        for axis in axes:
            sizes = {chunk for length in sizes for chunk in chunk_sizes(length, mesh.size(axis))}
        if size and 0 in sizes:
            return True
    return False


def has_even_shards(tensor: DTensor) -> bool:
    """Return True if all shards have one size and no placement is Partial."""
    sizes = list(tensor.shape)
    for axis, place in enumerate(tensor.placements):
        if place.is_replicate():
            continue
        ranks = tensor.device_mesh.size(axis)
        if not is_shard(place) or not sizes[place.dim] or sizes[place.dim] % ranks:
            return False
        sizes[place.dim] //= ranks
    return True


def largest_shard_numel(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    """Return the number of elements of the largest shard of a tensor of `shape`."""
    sizes = list(shape)
    for axis, placement in enumerate(placements):
        if is_shard(placement):
            sizes[placement.dim] = -(-sizes[placement.dim] // mesh.size(axis))
    return math.prod(sizes)


def chunk_sizes(size: int, ranks: int) -> list[int]:
    """Return the lengths of the shards of a dim."""
    step = -(-size // ranks)
    return [max(0, min(step, size - step * place)) for place in range(ranks)]


def only_sharding_axis(tensor: Any, dim: int) -> int | None:
    """Return the only mesh axis that shards `dim` of a tensor without Partials; None for any other tensor."""
    if not isinstance(tensor, DTensor) or not all(is_shard(p) or p.is_replicate() for p in tensor.placements):
        return None
    axes = sharded_axes(tensor.placements, (dim,))
    return axes[0] if len(axes) == 1 else None


def is_evenly_sharded(tensor: DTensor, dim: int) -> bool:
    """Return True if every rank has the same number of rows of a dim."""
    ranks = math.prod(
        tensor.device_mesh.size(axis)
        for axis, place in enumerate(tensor.placements)
        if is_shard(place) and place.dim == dim
    )
    return bool(tensor.shape[dim] % ranks == 0)
