"""topk along a sharded dim: each rank's own best are gathered, and the best of these are the best of all."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, moved, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.along.one_dim import when_empty
from holdfast.spmd.sharding.byte_costs import gathering_pays, is_cut, longest_shard
from holdfast.spmd.sharding.mesh_collectives import chunk_sizes, gathered, sharded_axes
from holdfast.spmd.sharding.reduced_result import named_dims

POSITION_BYTES = 8


def best_few(call: Call) -> Any:
    """The `k` largest or smallest along `dim`; among equals any, as one device promises no more."""
    tensor, wanted = call.values[0], call["k"]
    over = named_dims([call["dim"]], tensor.ndim)
    if over is None or not is_cut(tensor, over) or not 0 < wanted <= tensor.shape[over[0]]:
        return when_empty(call)
    axes = sharded_axes(tensor.placements, over)
    few = min(wanted, longest_shard(tensor, over[0]))
    if len(axes) > 1 or not gathering_pays(tensor, over, few * (tensor.dtype.itemsize + POSITION_BYTES)):
        return when_empty(call)
    return _of_candidates(call, tensor, over[0], axes[0], few)


def _of_candidates(call: Call, tensor: DTensor, dim: int, axis: int, few: int) -> Any:
    places = list(tensor.placements)
    own = moved(tensor, places, call.mesh)
    _, offsets = private.local_box(tensor.shape, call.mesh, places)
    value, place = torch.topk(own, min(few, own.shape[dim]), dim, call["largest"], call["sorted"])
    counts = [min(few, size) for size in chunk_sizes(int(tensor.shape[dim]), call.mesh.size(axis))]
    values = _joined(value, call, dim, axis, counts)
    positions = _joined(place + offsets[dim], call, dim, axis, counts)
    best, which = torch.topk(values, call["k"], dim, call["largest"], call["sorted"])
    shape = list(tensor.shape)
    shape[dim] = call["k"]
    whole: list[Placement] = [Replicate() if number == axis else kept for number, kept in enumerate(places)]
    return wrap(best, call.mesh, whole, shape), wrap(positions.gather(dim, which), call.mesh, whole, shape)


def _joined(part: torch.Tensor, call: Call, dim: int, axis: int, counts: list[int]) -> torch.Tensor:
    """Every rank's candidates side by side; what pads the shorter ones is cut off again."""
    shape = list(part.shape)
    shape[dim] = max(counts) - part.shape[dim]
    padded = torch.cat([part, part.new_zeros(shape)], dim) if shape[dim] else part
    everyone = gathered(padded, call.mesh, axis)
    return torch.cat(
        [candidates.narrow(dim, 0, count) for candidates, count in zip(everyone, counts, strict=True)], dim
    )


RULES = [
    Rule(
        "along",
        ("topk.default",),
        "every dim",
        "torch gathers the searched dim, and every dim when rows are fewer than ranks",
        best_few,
    ),
]
