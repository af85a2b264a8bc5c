"""group_norm by batch, and by channels where every shard has whole groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base.call import Call, Spot, cut_first, is_shard, moved, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules.pointwise.nonlinear import paddings


def _ranks(call: Call, places: Sequence[Placement]) -> int:
    """How many shards the channels are in."""
    axes = (axis for axis, place in enumerate(places) if is_shard(place) and place.dim == 1)
    return math.prod(call.mesh.size(axis) for axis in axes)


def _places(call: Call, source: DTensor) -> list[Placement]:
    """Batch shards stay, and channel shards of whole groups; a Partial goes into batch shards; the rest is gathered."""
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
        beside = isinstance(weight, DTensor) and weight.device_mesh == call.mesh and weight.placements[axis] == Shard(0)
        if place.is_replicate() and beside and 1 in _dims(call, source, kept, axis):
            kept[axis] = Shard(1)  # sends nothing, where the weights would have to be gathered
    for axis, place in enumerate(source.placements):
        if place == Partial():
            kept[axis] = _cut(call, source, kept, axis)
    return kept


def _cut(call: Call, source: DTensor, places: Sequence[Placement], axis: int) -> Placement:
    """Where a sum goes: into batch shards or whole groups, for half the bytes of having it on all ranks.

    What is gathered beside it is gathered later, cut by then.
    """
    found = _dims(call, source, places, axis)
    dim = min(found, key=lambda dim: found[dim], default=None)
    if dim is None and source.shape[0] >= call.mesh.size(axis) and Shard(0) not in places:
        dim = 0
    return Replicate() if dim is None else Shard(dim)


def _dims(call: Call, source: DTensor, places: Sequence[Placement], axis: int) -> dict[int, tuple[float, bool]]:
    """The dims that the ranks of an axis can share, batch and whole groups, and how much padding makes them longer."""
    channels = _ranks(call, places) * call.mesh.size(axis)
    by_groups = call["group"] == call["C"] or call["group"] % channels == 0
    found = paddings(source.shape, call.mesh, places, axis)
    return {dim: found[dim][:2] for dim in ((0, 1) if by_groups else (0,)) if dim in found}


def _brought(tensor: DTensor, places: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of a tensor: what is whole is cut, then sums go into shards, then the rest is gathered."""
    tensor = cut_first(tensor, places)
    first = [
        new if old == Partial() and is_shard(new) else old for old, new in zip(tensor.placements, places, strict=True)
    ]
    if Shard(0) in first and first != list(tensor.placements):
        tensor = wrap(moved(tensor, first, tensor.device_mesh), tensor.device_mesh, first, tensor.shape)
    return moved(tensor, places, tensor.device_mesh).contiguous()


def _channels(places: list[Placement]) -> list[Placement]:
    """Where a tensor of one value per channel goes."""
    return [Shard(0) if is_shard(place) and place.dim == 1 else Replicate() for place in places]


def _local_sizes(call: Call, places: list[Placement], local: torch.Tensor) -> dict[str, Any]:
    groups = local.shape[1] if call["group"] == call["C"] else call["group"] // _ranks(call, places)
    return {"N": local.shape[0], "C": local.shape[1], "group": groups}


def forward(call: Call) -> Any:
    """The normalised tensor, and the mean and deviation of each group."""
    source = call["input"]
    places = _places(call, source)
    local = _brought(source, places)
    tensors: dict[Spot, torch.Tensor] = {(0,): local}
    for position in (1, 2):
        if call.values[position] is not None:
            tensors[position,] = moved(call.values[position], _channels(places), call.mesh)
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
    """The gradients of weight and bias are summed over the batch shards.

    All three are linear in the gradient that comes in: where that is a sum, and all else is whole, they are sums.
    """
    source, given = call["input"], call["grad_out"]
    places = _places(call, source)
    sums = [axis for axis, place in enumerate(places) if place.is_replicate() and given.placements[axis] == Partial()]
    tensors: dict[Spot, torch.Tensor] = {
        (position,): _brought(tensor, _with_sums(places, sums) if tensor is given else places)
        for position, tensor in enumerate(call.values[:4])
    }
    if call["weight"] is not None:
        tensors[4,] = moved(call["weight"], _channels(places), call.mesh)
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
    """The placements with a sum on these axes."""
    return [Partial() if axis in axes else place for axis, place in enumerate(places)]


WHY = "torch gathers channel groups, and its backward raises for batch shards and without weight"
RULES = [
    Rule("norm", ("native_group_norm.default",), "batch, whole channel groups", WHY, forward, spares_even=True),
    Rule("norm", ("native_group_norm_backward.default",), "batch, whole channel groups", WHY, backward),
]
