"""topk along a sharded dim: the best of each rank's candidates are the best of all."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_box
from holdfast.spmd.rules.along.one_dim import when_empty
from holdfast.spmd.sharding.byte_costs import gathering_is_cheaper, is_sharded_along
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.mesh_collectives import all_gather
from holdfast.spmd.sharding.reduced_result import reduced_dims
from holdfast.spmd.sharding.shard_sizes import chunk_sizes, longest_shard, sharded_axes

POSITION_BYTES = 8


def topk(call: Call) -> Any:
    """Return the `k` largest or smallest along `dim`; the order of equals is free, as on one device."""
    tensor, wanted = call.values[0], call["k"]
    over = reduced_dims([call["dim"]], tensor.ndim)
    if over is None or not is_sharded_along(tensor, over) or not 0 < wanted <= tensor.shape[over[0]]:
        return when_empty(call)
    axes = sharded_axes(tensor.placements, over)
    few = min(wanted, longest_shard(tensor, over[0]))
    if len(axes) > 1 or not gathering_is_cheaper(tensor, over, few * (tensor.dtype.itemsize + POSITION_BYTES)):
        return when_empty(call)
    return _of_candidates(call, tensor, over[0], axes[0], few)


def _of_candidates(call: Call, tensor: DTensor, dim: int, axis: int, few: int) -> Any:
    places = list(tensor.placements)
    own = local_part(tensor, places, call.mesh)
    _, offsets = local_box(tensor.shape, call.mesh, places)
    value, place = torch.topk(own, min(few, own.shape[dim]), dim, call["largest"], call["sorted"])
    counts = [min(few, size) for size in chunk_sizes(int(tensor.shape[dim]), call.mesh.size(axis))]
    values = _concatenated(value, call, dim, axis, counts)
    positions = _concatenated(place + offsets[dim], call, dim, axis, counts)
    best, which = torch.topk(values, call["k"], dim, call["largest"], call["sorted"])
    shape = list(tensor.shape)
    shape[dim] = call["k"]
    whole: list[Placement] = [Replicate() if number == axis else kept for number, kept in enumerate(places)]
    return wrap(best, call.mesh, whole, shape), wrap(positions.gather(dim, which), call.mesh, whole, shape)


def _concatenated(part: torch.Tensor, call: Call, dim: int, axis: int, counts: list[int]) -> torch.Tensor:
    """Concatenate every rank's candidates, and drop the padding of the shorter ones."""
    shape = list(part.shape)
    shape[dim] = max(counts) - part.shape[dim]
    padded = torch.cat([part, part.new_zeros(shape)], dim) if shape[dim] else part
    everyone = all_gather(padded, call.mesh, axis)
    return torch.cat(
        [candidates.narrow(dim, 0, count) for candidates, count in zip(everyone, counts, strict=True)], dim
    )


RULES = [
    Rule(
        "along",
        ("topk.default",),
        "every dim",
        "torch gathers the searched dim, and every dim when rows are fewer than ranks",
        topk,
    ),
]
