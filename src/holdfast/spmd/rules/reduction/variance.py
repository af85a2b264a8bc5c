"""Variances over sharded dims: the mean is reduced, then the squares about it, as exactly as one device does it."""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import Call, moved
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.reduction.all_dims import all_dims
from holdfast.spmd.sharding.byte_costs import exact_dtype, is_cut, reducing_pays
from holdfast.spmd.sharding.mesh_collectives import reduced, sharded_axes
from holdfast.spmd.sharding.reduced_result import named_dims, shrunk

NUMBERS = 2  # a mean and a sum of squares


def variance(call: Call) -> Any:
    """var, std, var_mean and std_mean with any correction."""
    tensor = call.values[0]
    over = named_dims(call["dim"], tensor.ndim)
    if over is None or not is_cut(tensor, over) or not reducing_pays(tensor, over, NUMBERS):
        return all_dims(call)
    count = math.prod(tensor.shape[dim] for dim in over)
    freedom = count - (1 if call["correction"] is None else call["correction"])
    return all_dims(call) if freedom <= 0 else _reduced(call, tensor, over, count, freedom)


def _reduced(call: Call, tensor: DTensor, over: list[int], count: int, freedom: float) -> Any:
    axes = sharded_axes(tensor.placements, over)
    own = moved(tensor, tensor.placements, call.mesh)
    exact = own.to(exact_dtype(own.dtype))
    mean = reduced(exact.sum(over, keepdim=True), call.mesh, axes) / count
    spread = reduced((exact - mean).square().sum(over, keepdim=True), call.mesh, axes) / freedom
    name = call.op._schema.name.removeprefix("aten::")
    spread = spread.sqrt() if name.startswith("std") else spread
    parts = (spread, mean) if name.endswith("_mean") else (spread,)
    results = tuple(shrunk(part.to(own.dtype), tensor, over, call["keepdim"]) for part in parts)
    return results if len(results) > 1 else results[0]


RULES = [
    Rule(
        "reduction",
        ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"),
        "every dim",
        "torch gathers the reduced dims, and reduces no dim where an empty list means all",
        variance,
    ),
]
