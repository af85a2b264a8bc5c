"""group_norm by batch, and by channels if every shard has whole groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base.call import ArgSlot, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.local_parts import local_part, slice_replicas, wrap
from holdfast.spmd.sharding.partials import shardable_dims
from holdfast.spmd.sharding.shard_sizes import is_shard


def _ranks(call: Call, places: Sequence[Placement]) -> int:
    """Return the number of shards of the channels."""
    axes = (axis for axis, place in enumerate(places) if is_shard(place) and place.dim == 1)
    return math.prod(call.mesh.size(axis) for axis in axes)


def _places(call: Call, source: DTensor) -> list[Placement]:
    """Keep batch shards, and channel shards of whole groups; reduce-scatter Partials; gather the rest."""
    kept: list[Placement] = [
        place if is_shard(place) and place.dim == 0 else Replicate() for place in source.placements
    ]
    channels = [axis for axis, place in enumerate(source.placements) if is_shard(place) and place.dim == 1]
    ranks = 1
    for axis in sorted(channels, key=lambda axis: -call.mesh.size(axis)):  # the largest axis first
        if call["group"] == call["C"] or call["group"] % (ranks * call.mesh.size(axis)) == 0:
            ranks *= call.mesh.size(axis)
            kept[axis] = Shard(1)
    weight = call["weight"]
    for axis, place in enumerate(source.placements):
        by_channels = (
            isinstance(weight, DTensor) and weight.device_mesh == call.mesh and weight.placements[axis] == Shard(0)
        )
        if place.is_replicate() and by_channels and 1 in _dims(call, source, kept, axis):
            kept[axis] = Shard(1)  # sends nothing, while the weights would have to be gathered
    for axis, place in enumerate(source.placements):
        if place == Partial():
            kept[axis] = _placement_of_sum(call, source, kept, axis)
    return kept


def _placement_of_sum(call: Call, source: DTensor, places: Sequence[Placement], axis: int) -> Placement:
    """Return the placement for a Partial sum: batch shards or whole groups, for half the bytes of an all-reduce.

    Shards that have to be gathered are gathered later, when they are smaller.
    """
    dims = _dims(call, source, places, axis)
    dim = min(dims, key=lambda dim: dims[dim], default=None)
    if dim is None and source.shape[0] >= call.mesh.size(axis) and Shard(0) not in places:
        dim = 0
    return Replicate() if dim is None else Shard(dim)


def _dims(call: Call, source: DTensor, places: Sequence[Placement], axis: int) -> dict[int, tuple[float, bool]]:
    """Return the dims that the ranks of an axis can shard, batch and whole groups, with their growth by padding."""
    channels = _ranks(call, places) * call.mesh.size(axis)
    by_groups = call["group"] == call["C"] or call["group"] % channels == 0
    dims = shardable_dims(source.shape, call.mesh, places, axis)
    return {dim: dims[dim][:2] for dim in ((0, 1) if by_groups else (0,)) if dim in dims}


def _redistributed(tensor: DTensor, places: Sequence[Placement]) -> torch.Tensor:
    """Return this rank's part of a tensor: slice replicas, then reduce-scatter sums, then gather the rest."""
    tensor = slice_replicas(tensor, places)
    first = [
        new if old == Partial() and is_shard(new) else old for old, new in zip(tensor.placements, places, strict=True)
    ]
    if Shard(0) in first and first != list(tensor.placements):
        tensor = wrap(local_part(tensor, first, tensor.device_mesh), tensor.device_mesh, first, tensor.shape)
    return local_part(tensor, places, tensor.device_mesh).contiguous()


def _channels(places: list[Placement]) -> list[Placement]:
    """Return the placements of a tensor with one value per channel."""
    return [Shard(0) if is_shard(place) and place.dim == 1 else Replicate() for place in places]


def _local_sizes(call: Call, places: list[Placement], local: torch.Tensor) -> dict[str, Any]:
    groups = local.shape[1] if call["group"] == call["C"] else call["group"] // _ranks(call, places)
    return {"N": local.shape[0], "C": local.shape[1], "group": groups}


def forward(call: Call) -> Any:
    """Return the normalised tensor, and the mean and inverse deviation of each group."""
    source = call["input"]
    places = _places(call, source)
    local = _redistributed(source, places)
    tensors: dict[ArgSlot, torch.Tensor] = {(0,): local}
    for position in (1, 2):
        if call.values[position] is not None:
            tensors[position,] = local_part(call.values[position], _channels(places), call.mesh)
    sizes = _local_sizes(call, places, local)
    if local.numel():
        out, mean, deviation = call.run(tensors, **sizes)
    else:
        out, mean = torch.empty_like(local), local.new_empty(sizes["N"], sizes["group"])
        deviation = mean.clone()
    groups = (call["N"], call["group"])
    return (
        wrap(out, call.mesh, places, source.shape),
        wrap(mean, call.mesh, places, groups),
        wrap(deviation, call.mesh, places, groups),
    )


def backward(call: Call) -> Any:
    """Return the gradients; those of weight and bias are summed over the batch shards.

    All three are linear in the incoming gradient: if it is Partial, and all else is replicated, they are Partial.
    """
    source, incoming = call["input"], call["grad_out"]
    places = _places(call, source)
    sums = [
        axis for axis, place in enumerate(places) if place.is_replicate() and incoming.placements[axis] == Partial()
    ]
    tensors: dict[ArgSlot, torch.Tensor] = {
        (position,): _redistributed(tensor, _with_sums(places, sums) if tensor is incoming else places)
        for position, tensor in enumerate(call.values[:4])
    }
    if call["weight"] is not None:
        tensors[4,] = local_part(call["weight"], _channels(places), call.mesh)
    local = tensors[1,]
    if local.numel():
        gradients = call.run(tensors, **_local_sizes(call, places, local))
    else:
        channels = local.new_zeros(local.shape[1])
        wanted = call["output_mask"]
        gradients = [g if keep else None for g, keep in zip((local, channels, channels), wanted, strict=True)]
    summed: list[Placement] = [
        Partial() if is_shard(place) and place.dim == 0 else new
        for place, new in zip(places, _channels(places), strict=True)
    ]
    places, summed = _with_sums(places, sums), _with_sums(summed, sums)
    return (
        None if gradients[0] is None else wrap(gradients[0], call.mesh, places, source.shape),
        *(None if item is None else wrap(item, call.mesh, summed, (call["C"],)) for item in gradients[1:]),
    )


def _with_sums(places: list[Placement], axes: list[int]) -> list[Placement]:
    """Return the placements with a Partial sum on these axes."""
    return [Partial() if axis in axes else place for axis, place in enumerate(places)]


WHY = "torch gathers channel groups, and its backward raises for batch shards and without weight"
RULES = [
    Rule("norm", ("native_group_norm.default",), "batch, whole channel groups", WHY, forward, torch_handles_even=True),
    Rule("norm", ("native_group_norm_backward.default",), "batch, whole channel groups", WHY, backward),
]
