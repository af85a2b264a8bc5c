"""min, max, amin, amax and aminmax without indices: reduced at once, so that ties see the global value."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.mesh_collectives import all_reduce_extreme
from holdfast.spmd.sharding.partials import on_reduced_alike, reduce_scatter_placements
from holdfast.spmd.sharding.shard_sizes import is_shard, sharded_dim


def min_or_max(call: Call) -> Any:
    """Run amin, amax, min or max over dims (all if none are given)."""
    tensor, largest = call.values[0], "max" in call.op._schema.name
    dims = call["dim"] if "dim" in call.names else []
    keepdim = call["keepdim"] if "keepdim" in call.names else False
    over = {dim % max(tensor.ndim, 1) for dim in (dims or range(tensor.ndim))}
    if tensor.numel() == 0:
        return USE_TORCH
    if all(
        isinstance(place, Replicate) or (is_shard(place) and place.dim not in over) for place in tensor.placements
    ) and not has_empty_input(call):
        return USE_TORCH
    reduced = reduce_scatter_placements(tensor)  # as comparisons with the result reduce it: with the same rounding
    pairs = zip(tensor.placements, reduced, strict=True)
    kept = [place if sharded_dim(place) in over or _is_own_partial(place, largest) else other for place, other in pairs]
    local = local_part(tensor, kept, call.mesh)
    order = sorted(over)
    if any(local.shape[dim] == 0 for dim in order):
        shape = [1 if dim in over else size for dim, size in enumerate(local.shape)]
        part = torch.full(shape, worst_value(local.dtype, largest), dtype=local.dtype, device=local.device)
    else:
        part = (torch.amax if largest else torch.amin)(local, order, keepdim=True)
    joined = [axis for axis, place in enumerate(kept) if sharded_dim(place) in over or place.is_partial()]
    part = all_reduce_extreme(part, call.mesh, joined, largest)
    shape = [1 if dim in over else size for dim, size in enumerate(tensor.shape)]
    places: list[Any] = [Replicate() if axis in joined else place for axis, place in enumerate(kept)]
    if not keepdim:
        places = [Shard(p.dim - sum(d < p.dim for d in over)) if is_shard(p) else p for p in places]
        shape = [size for dim, size in enumerate(shape) if dim not in over]
        part = part.reshape([size for dim, size in enumerate(part.shape) if dim not in over])
    return wrap(part, call.mesh, places, shape)


def _is_own_partial(place: Placement, largest: bool) -> bool:
    """Return True for a Partial of the same reduction: the result can be computed on each rank's part."""
    return isinstance(place, Partial) and place.reduce_op == ("max" if largest else "min")


def worst_value(dtype: torch.dtype, largest: bool) -> Any:
    """Return the value that every other value beats."""
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    if dtype == torch.bool:
        return not largest
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def min_and_max(call: Call) -> Any:
    """Run aminmax: gathered if some rank has an empty shard; Partials are reduced as the gradient reduces them."""
    return gather_and_run(call) if has_empty_input(call) else on_reduced_alike(call)


def max_of_each(call: Call) -> Any:
    """Return the maximum of each tensor of a list, in which one with an empty shard must not affect the others."""
    return [torch.ops.aten.max.default(tensor) for tensor in call["self"]] if has_empty_input(call) else USE_TORCH


RULES = [
    Rule(
        "reduction",
        ("amin.default", "amax.default", "min.default", "max.default"),
        "every dim; the reduced ones are reduced at once",
        "torch leaves a Partial whose gradient divides by zero or forgets ties, and hangs when a shard is empty",
        min_or_max,
    ),
    Rule(
        "reduction",
        ("aminmax.default",),
        "as torch; whole where a shard is empty; a Partial is reduced first",
        "torch hangs when a shard is empty",
        min_and_max,
    ),
    Rule(
        "reduction",
        ("_foreach_max.default",),
        "as torch; the reduced ones are reduced at once where a shard is empty",
        "torch raises on the rank with an empty shard",
        max_of_each,
    ),
]
