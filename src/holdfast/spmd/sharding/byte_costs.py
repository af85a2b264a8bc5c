"""Whether a few numbers per row are fewer bytes than the row: what a rule asks before it leaves a sharded dim cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.distributed.tensor import DTensor, Placement

from holdfast.spmd.sharding.mesh_collectives import sharded_axes

HALVES = (torch.float16, torch.bfloat16)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in."""
    return torch.float32 if dtype in HALVES else dtype


def reducing_pays(tensor: DTensor, dims: Collection[int], numbers: int) -> bool:
    """Whether to reduce so many numbers, for all that lies along `dims`, is less than to gather these dims."""
    received = sum(2 * (ranks - 1) / ranks for ranks in _ranks(tensor, dims))
    return numbers * received * exact_dtype(tensor.dtype).itemsize < _gathered(tensor, dims)


def gathering_pays(tensor: DTensor, dims: Collection[int], row_bytes: int) -> bool:
    """Whether to gather so many bytes of every rank, one axis after the other, is less than to gather these dims."""
    return row_bytes * sum(ranks - 1 for ranks in _ranks(tensor, dims)) < _gathered(tensor, dims)


def is_cut(tensor: object, dims: Collection[int]) -> bool:
    """Whether one of `dims` is sharded, and the tensor otherwise in plain shards or whole."""
    if not isinstance(tensor, DTensor) or not tensor.numel() or not tensor.dtype.is_floating_point:
        return False
    axes = sharded_axes(tensor.placements)
    others = [place for axis, place in enumerate(tensor.placements) if axis not in axes]
    return bool(sharded_axes(tensor.placements, dims)) and all(place.is_replicate() for place in others)


def longest_shard(tensor: DTensor, dim: int, placements: Sequence[Placement] | None = None) -> int:
    """The length of the longest shard of a dim, to which the others are padded when they are gathered."""
    size = int(tensor.shape[dim])
    for axis in sharded_axes(tensor.placements if placements is None else placements, (dim,)):
        size = -(-size // tensor.device_mesh.size(axis))
    return size


def _ranks(tensor: DTensor, dims: Collection[int]) -> list[int]:
    return [tensor.device_mesh.size(axis) for axis in sharded_axes(tensor.placements, dims)]


def _gathered(tensor: DTensor, dims: Collection[int]) -> float:
    """The bytes that a rank receives, of all that lies along `dims`, to have it whole.

    Ranks that all have the same may first share out the other dims, as torch does: then each gathers its share only.
    """
    own, ranks = float(tensor.dtype.itemsize), 1
    for axis, place in enumerate(tensor.placements):
        own /= tensor.device_mesh.size(axis) if place.is_replicate() else 1
    for dim in dims:
        own *= longest_shard(tensor, dim)
    for count in _ranks(tensor, dims):
        ranks *= count
    return own * (ranks - 1)
