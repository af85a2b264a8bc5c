"""var, std, var_mean and std_mean over sharded dims: the mean is reduced, then the squared deviations."""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.reduction.all_dims import all_dims
from holdfast.spmd.sharding.byte_costs import accumulation_dtype, is_sharded_along, reducing_is_cheaper
from holdfast.spmd.sharding.local_parts import local_part
from holdfast.spmd.sharding.mesh_collectives import all_reduce
from holdfast.spmd.sharding.reduced_result import reduced_dims, reduced_result
from holdfast.spmd.sharding.shard_sizes import sharded_axes

NUMBERS = 2  # a mean and a sum of squares


def variance(call: Call) -> Any:
    """Run var, std, var_mean and std_mean with any correction."""
    tensor = call.values[0]
    over = reduced_dims(call["dim"], tensor.ndim)
    if over is None or not is_sharded_along(tensor, over) or not reducing_is_cheaper(tensor, over, NUMBERS):
        return all_dims(call)
    count = math.prod(tensor.shape[dim] for dim in over)
    freedom = count - (1 if call["correction"] is None else call["correction"])
    return all_dims(call) if freedom <= 0 else _reduced(call, tensor, over, count, freedom)


def _reduced(call: Call, tensor: DTensor, over: list[int], count: int, freedom: float) -> Any:
    axes = sharded_axes(tensor.placements, over)
    own = local_part(tensor, tensor.placements, call.mesh)
    exact = own.to(accumulation_dtype(own.dtype))
    mean = all_reduce(exact.sum(over, keepdim=True), call.mesh, axes) / count
    spread = all_reduce((exact - mean).square().sum(over, keepdim=True), call.mesh, axes) / freedom
    name = call.op._schema.name.removeprefix("aten::")
    spread = spread.sqrt() if name.startswith("std") else spread
    parts = (spread, mean) if name.endswith("_mean") else (spread,)
    results = tuple(reduced_result(part.to(own.dtype), tensor, over, call["keepdim"]) for part in parts)
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
