"""Reshapes of uneven shards, which no placement can describe unless the sharded dim stays as it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, apply, is_shard, moved, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.gathered_views import window


def reshape(call: Call) -> Any:
    """Leave what torch can do; gather where a reshaped dim is sharded unevenly, or by several axes that must part.

    Of several axes the largest is kept where the reshape can keep it, and the others are gathered.
    """
    tensor = call.values[0]
    if not isinstance(tensor, DTensor):
        return LEAVE
    if any(type(size) is int and size == 0 for size in tensor.shape):
        return _gathered(call)  # nothing to send; torch may look for the dims of what is empty without end
    if _breaks_strided(tensor, private.global_outputs(call.info).shape):
        return _gathered(call)
    dims = [place.dim for place in tensor.placements if is_shard(place)]
    if len(set(dims)) == len(dims) and all(is_even(tensor, dim) for dim in dims):
        return LEAVE
    if _fits(call):
        return LEAVE
    kept = _largest_kept(tensor)
    result = _on_kept(call, kept) if _can_keep(call, kept) else gather_and_run(call)
    return window(result, call) if private.is_view(call.op) else result


def reinterpret(call: Call) -> Any:
    """The bits of each rank's part; gather a Partial, and shards of the last dim that no shards of the result are.

    Nothing is left to torch, whose cache takes all dtypes for one.
    """
    tensor, dtype = call.values
    if not isinstance(tensor, DTensor):
        return LEAVE
    after = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta").view(dtype)
    is_resized = after.shape != tensor.shape
    if any(place.is_partial() for place in tensor.placements) or (is_resized and _breaks_numbers(tensor, dtype)):
        return _gathered(call)
    spec = private.make_spec(call.mesh, tensor.placements, after.shape, after.stride(), dtype)
    return private.wrap(call.op(private.local_of(tensor), dtype), spec)


def _breaks_numbers(tensor: DTensor, dtype: torch.dtype) -> bool:
    """Whether the last dim is cut, and not into equal parts of whole numbers of another size."""
    last = tensor.ndim - 1
    if all(place.is_replicate() or place.dim != last for place in tensor.placements):  # type: ignore[attr-defined]
        return False
    is_even_cut = _is_plain(tensor.placements) and is_even(tensor, last)
    return not is_even_cut or bool(private.local_of(tensor).shape[last] * tensor.dtype.itemsize % dtype.itemsize)


def _largest_kept(tensor: DTensor) -> tuple[Placement, ...]:
    """The placements with each dim left to the largest of the axes that cut it."""
    mesh, largest = tensor.device_mesh, dict[int, int]()
    for axis, place in enumerate(tensor.placements):
        if is_shard(place) and mesh.size(axis) > mesh.size(largest.setdefault(place.dim, axis)):
            largest[place.dim] = axis
    places = enumerate(tensor.placements)
    return tuple(Replicate() if is_shard(p) and largest[p.dim] != axis else p for axis, p in places)


def _can_keep(call: Call, kept: tuple[Placement, ...]) -> bool:
    """Whether a tensor that lies so is reshaped without moving again."""
    tensor = call.values[0]
    if kept == tensor.placements or not any(is_shard(place) for place in kept):
        return False
    sizes, _ = private.local_box(tensor.shape, call.mesh, [p if is_shard(p) else Replicate() for p in kept])
    empty = wrap(torch.empty(sizes, dtype=tensor.dtype, device="meta"), call.mesh, kept, tensor.shape)
    if not all(is_even(empty, place.dim) for place in kept if is_shard(place)):
        return False
    decided = private.decided_reshape(private.unwrap(call.op, (empty, *call.values[1:]), {}))
    return decided is not None and tuple(decided[0].placements) == kept


def _on_kept(call: Call, kept: tuple[Placement, ...]) -> Any:
    tensor = call.values[0]
    part = wrap(moved(tensor, kept, call.mesh), call.mesh, kept, tensor.shape)
    return apply(call.op, (part, *call.values[1:]))


def _gathered(call: Call) -> Any:
    return window(gather_and_run(call), call) if private.is_view(call.op) else gather_and_run(call)


def _breaks_strided(tensor: DTensor, after: Sequence[int]) -> bool:
    """Whether a dim that strided shards (FSDP2 beside TP) cut unevenly is split or merged."""
    return not _is_plain(tensor.placements) and _breaks_uneven(tensor, after)


def _is_plain(placements: Sequence[Placement]) -> bool:
    return all(type(place) in (Shard, Replicate, Partial) for place in placements)


def _breaks_uneven(tensor: DTensor, after: Sequence[int], axes: int = 1) -> bool:
    """Whether a dim whose shards, by so many axes or more, are not all of one length is split or merged."""
    ranks: dict[int, list[int]] = {}
    for axis, place in enumerate(tensor.placements):
        if not place.is_replicate() and not place.is_partial():
            ranks.setdefault(place.dim, []).append(tensor.device_mesh.size(axis))  # type: ignore[attr-defined]
    stay = {(math.prod(after[:dim]), size) for dim, size in enumerate(after)}
    return any(
        tensor.shape[dim] % math.prod(sizes) and (math.prod(tensor.shape[:dim]), tensor.shape[dim]) not in stay
        for dim, sizes in ranks.items()
        if len(sizes) >= axes
    )


def is_even(tensor: DTensor, dim: int) -> bool:
    """Whether every rank has as many rows of a dim as the others."""
    ranks = math.prod(
        tensor.device_mesh.size(axis)
        for axis, place in enumerate(tensor.placements)
        if is_shard(place) and place.dim == dim
    )
    return bool(tensor.shape[dim] % ranks == 0)


def _fits(call: Call) -> bool:
    """Whether, as torch decides a reshape, every rank's part has as many elements after as before."""
    if (decided := private.decided_reshape(call.info)) is None:
        return False
    before, after = decided
    if not all(_is_plain(spec.placements) for spec in decided):
        return not _breaks_uneven(call.values[0], after.shape, axes=2)  # else strided shards are torch's own affair
    coordinates = itertools.product(*(range(size) for size in before.mesh.shape))
    return all(_elements(before, at) == _elements(after, at) for at in coordinates)


def _elements(spec: Any, coordinate: Sequence[int]) -> int:
    """How many elements the rank at a coordinate has of a tensor."""
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
