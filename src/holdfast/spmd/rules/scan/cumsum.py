"""The rule of cumsum along a sharded dim: ranks add the totals of the ranks before them (see cumsum_gradient.py)."""

from __future__ import annotations

from typing import Any

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_versions import is_torch_2_11
from holdfast.spmd.rules.scan.cumsum_gradient import flip_locally_in_gradients, may_stay_sharded, sharded_cumsum
from holdfast.spmd.rules.scan.negative_dim import with_positive_dim
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.reduced_result import reduced_dims
from holdfast.spmd.sharding.shard_sizes import sharded_axes


def cumsum(call: Call) -> Any:
    """Gather one number per row, and one more for the gradient; torch 2.11 would not use the gradient's flips."""
    tensor, dtype = call.values[0], call["dtype"]
    dims = reduced_dims([call["dim"]], tensor.ndim)
    if dims is None or dtype not in (None, tensor.dtype) or is_torch_2_11() or not may_stay_sharded(tensor, dims[0]):
        return with_positive_dim(call)
    flip_locally_in_gradients()
    axis = sharded_axes(tensor.placements, dims)[0]
    own = local_part(tensor, tensor.placements, call.mesh)
    return wrap(sharded_cumsum(own, call.mesh, axis, dims[0]), call.mesh, tensor.placements, tensor.shape)


RULES = [
    Rule(
        "scan",
        ("cumsum.default",),
        "every dim",
        "torch gathers the scanned dim, and takes a negative one for another than the sharded one",
        cumsum,
    ),
]
