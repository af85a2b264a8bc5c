"""Means over uneven shards, or in float16: each rank's sum, divided by the number of all elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.reduction.all_dims import all_dims
from holdfast.spmd.sharding.byte_costs import is_sharded_along
from holdfast.spmd.sharding.shard_sizes import is_shard


def mean(call: Call) -> Any:
    """Leave even shards to torch, which averages their means; sum the shards that torch would gather.

    In float16 the sum of the means, which torch divides afterwards, may overflow.
    """
    tensor = call.values[0]
    dims = call["dim"] if "dim" in call.names else None
    if not isinstance(tensor, DTensor) or not tensor.ndim or not tensor.dtype.is_floating_point:
        return USE_TORCH
    over = sorted({dim % tensor.ndim for dim in dims or range(tensor.ndim)})
    kind = call["dtype"] or tensor.dtype
    may_overflow = kind == torch.float16 and is_sharded_along(tensor, over)
    if not may_overflow and not any(_is_uneven(tensor, dim) for dim in over):
        return all_dims(call) if "dim" in call.names else USE_TORCH
    keepdim = call["keepdim"] if "keepdim" in call.names else False
    total = torch.ops.aten.sum.dim_IntList(tensor, over, keepdim, dtype=torch.promote_types(kind, torch.float32))
    mean = torch.ops.aten.div.Tensor(total, math.prod(tensor.shape[dim] for dim in over))
    return mean if mean.dtype == kind else torch.ops.aten._to_copy.default(mean, dtype=kind)


def _is_uneven(tensor: DTensor, dim: int) -> bool:
    axes = [axis for axis, place in enumerate(tensor.placements) if is_shard(place) and place.dim == dim]
    return bool(tensor.shape[dim] % math.prod(tensor.device_mesh.size(axis) for axis in axes))


RULES = [
    Rule(
        "reduction",
        ("mean.default", "mean.dim"),
        "every dim",
        "torch gathers uneven shards, overflows in float16, and takes an empty list of dims for none",
        mean,
    ),
]
