"""Partials: placements to reduce them to (replicas, shards, no strided shards), and writes that keep them Partial.

A write keeps the tensor Partial, in the same memory, so that its views and aliases see the write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.torch_modes import own_coordinate, simulates_ranks
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.shard_sizes import has_empty_shard, is_shard

# Held by all ranks but the first; for other reductions every rank holds the contents.
IDENTITIES = {"sum": 0.0, "product": 1.0}


def is_partial(tensor: Any) -> bool:
    """Return True for a DTensor with a Partial placement."""
    return isinstance(tensor, DTensor) and any(isinstance(place, Partial) for place in tensor.placements)


def reduced_placements(tensor: DTensor) -> list[Placement]:
    """Return the placements after all Partials are reduced to replicas."""
    return [Replicate() if isinstance(place, Partial) else place for place in tensor.placements]


def overwrite(tensor: DTensor, contents: torch.Tensor) -> None:
    """Write `contents`, this rank's part under `reduced_placements`, into a tensor's own memory."""
    local_of(tensor).copy_(own_share(tensor, contents))


def own_share(tensor: DTensor, contents: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of contents that every rank of the Partial axes has."""
    for axis, place in enumerate(tensor.placements):
        if not isinstance(place, Partial) or place.reduce_op not in IDENTITIES:
            continue
        if simulates_ranks() and place.reduce_op == "sum" and contents.is_floating_point():
            contents = contents / tensor.device_mesh.size(axis)  # no rank is the first: all divide alike
        elif not is_first(tensor, axis):
            return torch.full_like(contents, IDENTITIES[place.reduce_op])
    return contents


def is_first(tensor: DTensor, axis: int) -> bool:
    """Return True if this rank is the first along a mesh axis."""
    return own_coordinate(tensor.device_mesh)[axis] == 0


def reduce_scatter_placements(tensor: DTensor) -> list[Placement]:
    """Return placements without Partials: reduced straight into the shards that need the least padding.

    That takes half the bytes of an all-reduce. Existing shards stay, and may be sharded further. A tensor without
    shards, and without a dim that divides evenly, is all-reduced: padded shards cost more when they are gathered.
    """
    places = without_strided_shards(tensor.placements)
    has_no_shards = not any(is_shard(place) for place in places)
    for axis, place in enumerate(tensor.placements):
        if isinstance(place, Partial):
            dims = shardable_dims(tensor.shape, tensor.device_mesh, places, axis) if place.reduce_op == "sum" else {}
            dim = min(dims, key=lambda dim: dims[dim], default=None)
            places[axis] = Replicate() if dim is None or (has_no_shards and dims[dim][0] > 1) else Shard(dim)
    return places


def without_strided_shards(placements: Sequence[Placement]) -> list[Placement]:
    """Return the placements with strided shards (FSDP2 with TP), which have no box, replaced by Replicate."""
    return [place if is_shard(place) or isinstance(place, Partial) else Replicate() for place in placements]


def shardable_dims(
    shape: Sequence[int], mesh: DeviceMesh, places: Sequence[Placement], axis: int
) -> dict[int, tuple[float, bool, int]]:
    """Return the dims that the ranks of `axis` can shard without empty shards.

    With each dim: its growth by padding, whether another axis shards it already, and its negated length.
    """
    dims: dict[int, tuple[float, bool, int]] = {}
    ranks = mesh.size(axis)
    for dim, length in enumerate(shape):
        axes = [number for number, place in enumerate(places) if is_shard(place) and place.dim == dim]
        sharded = [place if number != axis else Shard(dim) for number, place in enumerate(places)]
        if any(number > axis for number in axes) or not length or has_empty_shard(shape, mesh, sharded):
            continue
        own = length
        for number in axes:
            own = -(-own // mesh.size(number))
        dims[dim] = (-(-own // ranks) * ranks / own, bool(axes), -own)
    return dims


def reduce_partials(tensor: Any) -> Any:
    """Return the tensor with every Partial reduced."""
    if not isinstance(tensor, DTensor) or not any(isinstance(place, Partial) for place in tensor.placements):
        return tensor
    places = reduce_scatter_placements(tensor)
    return wrap(local_part(tensor, places, tensor.device_mesh), tensor.device_mesh, places, tensor.shape)


def on_reduced_alike(call: Call) -> Any:
    """Reduce Partials as every other call of this function does, with the same rounding, and call again."""
    if call.is_inplace or not any(is_partial(tensor) for _, tensor in call.tensor_args()):
        return USE_TORCH
    return call.again(reduce_partials)
