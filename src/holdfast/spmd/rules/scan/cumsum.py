"""cumsum along a sharded dim: each rank scans its own shard, and adds the totals of the ranks before it."""

from __future__ import annotations

from typing import Any

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, moved, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.scan.cumsum_gradient import may_stay_cut, running
from holdfast.spmd.rules.scan.negative_dim import from_the_front
from holdfast.spmd.sharding.mesh_collectives import sharded_axes
from holdfast.spmd.sharding.plain_tensors import demand_flips
from holdfast.spmd.sharding.reduced_result import named_dims


def cumulated(call: Call) -> Any:
    """One number a row is gathered, and one more for the gradient; torch 2.11 would not know its flips."""
    tensor, dtype = call.values[0], call["dtype"]
    dims = named_dims([call["dim"]], tensor.ndim)
    if dims is None or dtype not in (None, tensor.dtype) or private.is_oldest() or not may_stay_cut(tensor, dims[0]):
        return from_the_front(call)
    demand_flips()
    axis = sharded_axes(tensor.placements, dims)[0]
    own = moved(tensor, tensor.placements, call.mesh)
    return wrap(running(own, call.mesh, axis, dims[0]), call.mesh, tensor.placements, tensor.shape)


RULES = [
    Rule(
        "scan",
        ("cumsum.default",),
        "every dim",
        "torch gathers the scanned dim, and takes a negative one for another than the sharded one",
        cumulated,
    ),
]
