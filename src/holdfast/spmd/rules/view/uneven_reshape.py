"""view, reshape and view(dtype) of uneven or strided shards: left to torch, gathered in part, or gathered."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base import torch_dispatch, torch_specs
from holdfast.spmd.base.call import USE_TORCH, Call, apply
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_decisions import decided_reshape
from holdfast.spmd.base.torch_dispatch import is_view
from holdfast.spmd.base.torch_specs import local_box, local_of, make_spec
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.gathered_views import gathered_view
from holdfast.spmd.sharding.local_elements import local_elements
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.shard_sizes import is_evenly_sharded, is_shard


def reshape(call: Call) -> Any:
    """Leave to torch what it can do; gather if a reshaped dim is sharded unevenly, or by several axes that must split.

    Of several axes the largest is kept if the reshape can keep it, and the others are gathered.
    """
    tensor = call.values[0]
    if not isinstance(tensor, DTensor):
        return USE_TORCH
    if any(type(size) is int and size == 0 for size in tensor.shape):
        return _gathered(call)  # nothing to send; torch's search for the dims of an empty tensor may not end
    dims = [place.dim for place in tensor.placements if is_shard(place)]
    is_even = len(set(dims)) == len(dims) and all(is_evenly_sharded(tensor, dim) for dim in dims)
    decided = decided_reshape(call.info)
    if decided is not None and _keeps_elements(*decided, is_even):
        return USE_TORCH
    if not _is_plain(tensor.placements):
        return _gathered(call)
    kept = _largest_kept(tensor)
    result = _on_kept(call, kept) if _can_keep(call, kept) else gather_and_run(call)
    return gathered_view(result, call) if is_view(call.op) else result


def reinterpret(call: Call) -> Any:
    """Reinterpret the bits of each rank's part; gather a Partial, and shards of the last dim that do not fit.

    Nothing is left to torch, whose cache does not distinguish dtypes.
    """
    tensor, dtype = call.values
    if not isinstance(tensor, DTensor):
        return USE_TORCH
    after = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta").view(dtype)
    is_resized = after.shape != tensor.shape
    if any(place.is_partial() for place in tensor.placements) or (is_resized and _breaks_numbers(tensor, dtype)):
        return _gathered(call)
    spec = make_spec(call.mesh, tensor.placements, after.shape, after.stride(), dtype)
    return torch_specs.wrap(call.op(local_of(tensor), dtype), spec)


def _breaks_numbers(tensor: DTensor, dtype: torch.dtype) -> bool:
    """Return True if the last dim is sharded, and not evenly into whole elements of the new size."""
    last = tensor.ndim - 1
    if all(place.is_replicate() or place.dim != last for place in tensor.placements):  # type: ignore[attr-defined]
        return False
    is_even = _is_plain(tensor.placements) and is_evenly_sharded(tensor, last)
    return not is_even or bool(local_of(tensor).shape[last] * tensor.dtype.itemsize % dtype.itemsize)


def _largest_kept(tensor: DTensor) -> tuple[Placement, ...]:
    """Return the placements with each dim sharded only by the largest of its axes."""
    mesh, largest = tensor.device_mesh, dict[int, int]()
    for axis, place in enumerate(tensor.placements):
        if is_shard(place) and mesh.size(axis) > mesh.size(largest.setdefault(place.dim, axis)):
            largest[place.dim] = axis
    places = enumerate(tensor.placements)
    return tuple(Replicate() if is_shard(p) and largest[p.dim] != axis else p for axis, p in places)


def _can_keep(call: Call, kept: tuple[Placement, ...]) -> bool:
    """Return True if a tensor with these placements is reshaped without another redistribution."""
    tensor = call.values[0]
    if kept == tensor.placements or not any(is_shard(place) for place in kept):
        return False
    sizes, _ = local_box(tensor.shape, call.mesh, [p if is_shard(p) else Replicate() for p in kept])
    empty = wrap(torch.empty(sizes, dtype=tensor.dtype, device="meta"), call.mesh, kept, tensor.shape)
    if not all(is_evenly_sharded(empty, place.dim) for place in kept if is_shard(place)):
        return False
    decided = decided_reshape(torch_dispatch.unwrap(call.op, (empty, *call.values[1:]), {}))
    return decided is not None and tuple(decided[0].placements) == kept


def _on_kept(call: Call, kept: tuple[Placement, ...]) -> Any:
    tensor = call.values[0]
    part = wrap(local_part(tensor, kept, call.mesh), call.mesh, kept, tensor.shape)
    return apply(call.op, (part, *call.values[1:]))


def _gathered(call: Call) -> Any:
    return gathered_view(gather_and_run(call), call) if is_view(call.op) else gather_and_run(call)


def _is_plain(placements: Sequence[Placement]) -> bool:
    return all(type(place) in (Shard, Replicate, Partial) for place in placements)


def _keeps_elements(before: Any, after: Any, is_even: bool) -> bool:
    """Return True if every rank's part is the same elements before and after a reshape as torch decides it."""
    if _is_plain(before.placements) and _is_plain(after.placements):
        coordinates = itertools.product(*(range(size) for size in before.mesh.shape))
        return is_even or all(_elements(before, at) == _elements(after, at) for at in coordinates)
    if not all(type(size) is int for size in (*before.shape, *after.shape)):
        return _is_plain(before.placements) and is_even  # symbolic sizes, in a trace
    own = local_elements(before.shape, before.mesh, before.placements)
    return own is not None and own == local_elements(after.shape, after.mesh, after.placements)


def _elements(spec: Any, coordinate: Sequence[int]) -> int:
    """Return the number of elements of the rank at a coordinate."""
    sizes = list(spec.shape)
    for axis, place in enumerate(spec.placements):
        if is_shard(place):
            step = -(-sizes[place.dim] // spec.mesh.size(axis))
            sizes[place.dim] = max(0, min(step, sizes[place.dim] - step * coordinate[axis]))
    return math.prod(sizes)


RULES = [
    Rule(
        "view",
        ("view.default", "_unsafe_view.default", "reshape.default"),
        "as torch, where every rank's part fits",
        "torch raises where an uneven dim is split or merged",
        reshape,
    ),
    Rule(
        "view",
        ("view.dtype",),
        "every dim; the last, where every rank's part fits",
        "torch takes the bits of each rank's part of a sum, and uneven shards for shards of more or fewer numbers",
        reinterpret,
    ),
]
