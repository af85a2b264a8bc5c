"""Byte costs of reductions: reducing or gathering a few numbers per row against gathering the rows."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.torch_specs import HALF_DTYPES
from holdfast.spmd.sharding.shard_sizes import longest_shard, sharded_axes


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to accumulate in."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


def reducing_is_cheaper(tensor: DTensor, dims: Collection[int], numbers: int) -> bool:
    """Return True if all-reducing `numbers` values per row moves fewer bytes than gathering `dims`."""
    received = sum(2 * (ranks - 1) / ranks for ranks in _ranks(tensor, dims))
    return numbers * received * accumulation_dtype(tensor.dtype).itemsize < _gathered_bytes(tensor, dims)


def gathering_is_cheaper(tensor: DTensor, dims: Collection[int], row_bytes: int) -> bool:
    """Return True if gathering `row_bytes` per row, one axis after another, moves fewer bytes than gathering `dims`."""
    return row_bytes * sum(ranks - 1 for ranks in _ranks(tensor, dims)) < _gathered_bytes(tensor, dims)


def is_sharded_along(tensor: object, dims: Collection[int]) -> bool:
    """Return True for a float tensor without Partials that is sharded along one of `dims`."""
    if not isinstance(tensor, DTensor) or not tensor.numel() or not tensor.dtype.is_floating_point:
        return False
    axes = sharded_axes(tensor.placements)
    others = [place for axis, place in enumerate(tensor.placements) if axis not in axes]
    return bool(sharded_axes(tensor.placements, dims)) and all(place.is_replicate() for place in others)


def _ranks(tensor: DTensor, dims: Collection[int]) -> list[int]:
    return [tensor.device_mesh.size(axis) for axis in sharded_axes(tensor.placements, dims)]


def _gathered_bytes(tensor: DTensor, dims: Collection[int]) -> float:
    """Return the bytes per row that a rank receives to gather `dims`.

    Ranks that hold replicas may divide the other dims first, as torch does: then each gathers only its share.
    """
    own, ranks = float(tensor.dtype.itemsize), 1
    for axis, place in enumerate(tensor.placements):
        own /= tensor.device_mesh.size(axis) if place.is_replicate() else 1
    for dim in dims:
        own *= longest_shard(tensor, dim)
    for count in _ranks(tensor, dims):
        ranks *= count
    return own * (ranks - 1)
