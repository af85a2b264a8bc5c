"""logsumexp over sharded dims: a maximum and a sum are reduced, the tensor is not moved."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.mesh_collectives import all_reduce
from holdfast.spmd.sharding.shard_sizes import is_shard, sharded_axes

REDUCED = 4  # a maximum and a sum, each sent twice


def logsumexp(call: Call) -> Any:
    """Return log(sum(exp(x))) over `dim`, without overflow."""
    tensor = call.values[0]
    if not isinstance(tensor, DTensor) or not tensor.ndim or not tensor.dtype.is_floating_point or not tensor.numel():
        return USE_TORCH
    over = {dim % tensor.ndim for dim in (call["dim"] or range(tensor.ndim))}
    if all(isinstance(place, Replicate) for place in tensor.placements):
        return USE_TORCH
    kept = _kept(tensor, over)
    axes = [axis for axis, place in enumerate(kept) if is_shard(place) and place.dim in over]
    local = local_part(tensor, kept, call.mesh)
    order = sorted(over)
    shape = [1 if dim in over else size for dim, size in enumerate(local.shape)]
    empty = any(local.shape[dim] == 0 for dim in order)
    top = local.new_full(shape, float("-inf")) if empty else local.amax(order, keepdim=True)
    top = all_reduce(top, call.mesh, axes, "max")
    top = torch.where(top.isinf(), 0.0, top)
    out = all_reduce((local - top).exp().sum(order, keepdim=True), call.mesh, axes).log() + top
    places: list[Placement] = [Replicate() if axis in axes else place for axis, place in enumerate(kept)]
    shape = [1 if dim in over else size for dim, size in enumerate(tensor.shape)]
    if not call["keepdim"]:
        out = out.reshape([size for dim, size in enumerate(out.shape) if dim not in over])
        places = [Shard(p.dim - sum(d < p.dim for d in over)) if is_shard(p) else p for p in places]
        shape = [size for dim, size in enumerate(shape) if dim not in over]
    return wrap(out, call.mesh, places, shape)


def _kept(tensor: DTensor, over: set[int]) -> list[Placement]:
    """Return the shards to keep: all, except of a reduced dim so short that gathering it is cheaper."""
    kept: list[Placement] = [place if is_shard(place) else Replicate() for place in tensor.placements]
    axes = sharded_axes(kept, over)
    if len(over) > 1 or not axes:
        return kept
    rows, ranks, reductions = int(tensor.shape[min(over)]), 1, 0.0
    for axis in axes:
        size = tensor.device_mesh.size(axis)
        rows, ranks, reductions = -(-rows // size), ranks * size, reductions + REDUCED * (size - 1) / size
    if rows * (ranks - 1) >= reductions:
        return kept
    return [Replicate() if axis in axes else place for axis, place in enumerate(kept)]


RULES = [
    Rule(
        "reduction",
        ("logsumexp.default",),
        "every dim",
        "torch gathers the reduced dim, and hangs where another dim is sharded unevenly",
        logsumexp,
    ),
]
