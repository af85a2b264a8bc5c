"""flip and roll along the sharded dim: each rank fetches the rows of its shard of the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import wrap
from holdfast.spmd.sharding.row_permutation import RowPermutation, Rows, permuting_is_cheaper
from holdfast.spmd.sharding.shard_sizes import has_empty_shard, is_shard, only_sharding_axis


def flip_or_roll(call: Call) -> Any:
    """Permute rows; each rank keeps its number of rows."""
    tensor = call.values[0]
    dims = [dim % max(tensor.ndim, 1) for dim in call["dims"]]
    sharded = {place.dim for place in tensor.placements if is_shard(place) and place.dim in dims}
    axis = only_sharding_axis(tensor, min(sharded)) if len(sharded) == 1 else None
    if axis is None or has_empty_shard(tensor.shape, call.mesh, tensor.placements):
        return USE_TORCH
    (dim,) = sharded
    permutation = RowPermutation(call.mesh, axis, dim, tensor.shape[dim], _source(call, tensor.shape[dim], dim))
    if not permuting_is_cheaper(permutation, tensor):
        return USE_TORCH
    local = permutation.fetch(local_of(tensor))
    others = [place for place, other in enumerate(dims) if other != dim]
    changes = {name: [call[name][place] for place in others] for name in ("shifts", "dims") if name in call.names}
    result = call.run({(0,): local}, **changes) if others else local
    return wrap(result, call.mesh, tensor.placements, tensor.shape)


def _source(call: Call, size: int, dim: int) -> Rows:
    rows = np.arange(size)
    if "shifts" not in call.names:
        return rows[::-1]
    dims = [other % call.values[0].ndim for other in call["dims"]]
    return np.roll(rows, sum(shift for shift, other in zip(call["shifts"], dims, strict=True) if other == dim))


RULES = [
    Rule("along", ("flip.default", "roll.default"), "every dim", "torch gathers the tensor", flip_or_roll),
]
