"""Tensors of one shape that lie apart: torch weighs which of them to bring to the others, for the fewest bytes."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call
from holdfast.spmd.sharding.infeasible_decisions import cannot_be_done
from holdfast.spmd.sharding.mesh_collectives import sharded_axes


def torch_joins(call: Call) -> bool:
    """Whether torch brings such tensors together, none of them in parts any more: then its way is right.

    Tensors of one shape only: what is compared with its own maximum must be reduced as that was. And none with fewer
    rows than ranks, which torch gathers.
    """
    tensors = [tensor for _, tensor in call.spots()]
    if not _have_one_shape(tensors) or not _lie_apart(tensors) or any(map(_has_few, tensors)):  # type: ignore[arg-type]
        return False
    sharding = private.decision(call.info)
    if sharding is None or cannot_be_done(sharding, call.op, call.info):
        return False
    specs = private.decided_specs(sharding)
    return bool(specs) and not any(place.is_partial() for spec in specs for place in spec.placements)


def _have_one_shape(tensors: list[torch.Tensor]) -> bool:
    return all(isinstance(tensor, DTensor) and tensor.shape == tensors[0].shape for tensor in tensors)


def _lie_apart(tensors: list[DTensor]) -> bool:
    """Whether on some axis one is cut otherwise than another, or in parts where the other is cut."""
    axes = zip(*(tensor.placements for tensor in tensors), strict=True)
    return any(len({place for place in places if not place.is_replicate()}) > 1 for places in axes)


def _has_few(tensor: DTensor) -> bool:
    """Whether a dim is cut into more shards than it has rows."""
    cuts = (
        math.prod(tensor.device_mesh.size(axis) for axis in sharded_axes(tensor.placements, (dim,)))
        for dim in range(tensor.ndim)
    )
    return any(size < ranks for size, ranks in zip(tensor.shape, cuts, strict=True))
