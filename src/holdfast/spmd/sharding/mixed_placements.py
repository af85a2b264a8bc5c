"""Tensors of one shape with different placements: a test for calls that torch aligns to common placements."""

from __future__ import annotations

import math

from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_decisions
from holdfast.spmd.base.call import Call
from holdfast.spmd.base.torch_decisions import decided_specs
from holdfast.spmd.sharding.infeasible_decisions import is_infeasible
from holdfast.spmd.sharding.shard_sizes import sharded_axes


def torch_aligns(call: Call) -> bool:
    """Return True if torch redistributes such tensors to common placements without Partials: torch's decision is right.

    Only for tensors of one shape: a tensor that is compared with its own maximum must be reduced in the same way as the
    maximum. Not for dims with fewer rows than ranks, which torch gathers.
    """
    tensors = [tensor for _, tensor in call.tensor_args()]
    dtensors = [tensor for tensor in tensors if isinstance(tensor, DTensor) and tensor.shape == tensors[0].shape]
    if len(dtensors) < len(tensors) or not _are_placed_differently(dtensors):
        return False
    if any(map(_has_fewer_rows_than_ranks, dtensors)):
        return False
    sharding = torch_decisions.decision(call.info)
    if sharding is None or is_infeasible(sharding, call.op, call.info):
        return False
    specs = decided_specs(sharding)
    return bool(specs) and not any(place.is_partial() for spec in specs for place in spec.placements)


def _are_placed_differently(tensors: list[DTensor]) -> bool:
    """Return True if on some axis two tensors have different placements other than Replicate."""
    axes = zip(*(tensor.placements for tensor in tensors), strict=True)
    return any(len({place for place in places if not place.is_replicate()}) > 1 for places in axes)


def _has_fewer_rows_than_ranks(tensor: DTensor) -> bool:
    """Return True if a dim has fewer rows than shards."""
    shards = (
        math.prod(tensor.device_mesh.size(axis) for axis in sharded_axes(tensor.placements, (dim,)))
        for dim in range(tensor.ndim)
    )
    return any(size < ranks for size, ranks in zip(tensor.shape, shards, strict=True))
