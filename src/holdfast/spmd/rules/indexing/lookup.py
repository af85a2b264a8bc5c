"""x[i] and index_select along the sharded dim: each rank looks up its own rows, and the results are summed.

This moves fewer bytes than the tensor has if few rows are asked for; if not, the tensor is gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_specs import local_box, local_of
from holdfast.spmd.base.torch_versions import is_torch_2_11
from holdfast.spmd.rules import torch_2_11
from holdfast.spmd.sharding import index_checks
from holdfast.spmd.sharding.index_checks import MASKS, is_in_range, is_replicated
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.mesh_collectives import all_reduce
from holdfast.spmd.sharding.shard_sizes import is_shard, largest_shard_numel, only_sharding_axis


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup along a dim that one mesh axis shards: the tensor, the indices, and the placements of the result."""

    tensor: DTensor
    dim: int
    axis: int
    index: torch.Tensor  # on this rank, not negative
    shape: tuple[int, ...]
    places: tuple[Placement, ...]

    @property
    def is_cheaper(self) -> bool:
        """Return True if summing the results moves fewer bytes than gathering shards padded to the longest.

        Uses the largest shard and not this rank's, which may be empty: all ranks must decide alike.
        """
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        idle = math.prod(mesh.size(axis) for axis, place in enumerate(placements) if place.is_replicate())
        asked = largest_shard_numel(self.shape, mesh, self.places) * idle  # torch may shard another dim over idle axes
        return 2 * asked <= mesh.size(self.axis) * largest_shard_numel(self.tensor.shape, mesh, placements)

    @property
    def is_in_range(self) -> bool:
        """Return True if the indices are in range; if not, the default path raises."""
        return is_in_range(self.index, 0, self.tensor.shape[self.dim] - 1)


def index(call: Call) -> Any:
    """Run x[:, i] with one integer tensor."""
    keys = [(dim, key) for dim, key in enumerate(call["indices"]) if key is not None]
    if len(keys) == 1 and keys[0][1].dtype not in MASKS:
        result = _slices(call, *keys[0])
        if result is not None:
            return result
    return torch_2_11.index(call) if is_torch_2_11() else index_checks.with_replicated_indices(call)


def index_select(call: Call) -> Any:
    """Run index_select."""
    tensor = call.values[0]
    if tensor.ndim and call["index"].ndim == 1:
        result = _slices(call, call["dim"] % tensor.ndim, call["index"])
        if result is not None:
            return result
    return torch_2_11.select(call) if is_torch_2_11() else index_checks.with_replicated_indices(call)


def _slices(call: Call, dim: int, index: Any) -> Any:
    """Look up full slices of a tensor: the dims of the indices replace `dim`."""
    tensor = call.values[0]
    axis = only_sharding_axis(tensor, dim)
    if axis is None or not is_replicated(index) or tensor.dtype.is_complex:
        return None
    numbers = local_part(index, [Replicate()] * call.mesh.ndim, call.mesh).long()
    numbers = torch.where(numbers < 0, numbers + tensor.shape[dim], numbers)
    shape = (*tensor.shape[:dim], *numbers.shape, *tensor.shape[dim + 1 :])
    later = numbers.ndim - 1
    places = [_kept(place, dim, later) for place in tensor.placements]
    lookup = Lookup(tensor, dim, axis, numbers, shape, tuple(places))
    if not lookup.is_cheaper or not lookup.is_in_range:
        return None
    own, there = local_indices(lookup)
    local = local_of(tensor)
    sizes = (*local.shape[:dim], *numbers.shape, *local.shape[dim + 1 :])
    rows = local.index_select(dim, own.flatten()).reshape(sizes) if local.shape[dim] else local.new_zeros(sizes)
    return sum_over_ranks(lookup, rows, there.reshape(*there.shape, *(1,) * (tensor.ndim - dim - 1)))


def _kept(place: Placement, dim: int, later: int) -> Placement:
    if not is_shard(place) or place.dim == dim:
        return Replicate()
    return Shard(place.dim + later) if place.dim > dim else place


def local_indices(lookup: Lookup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices into this rank's shard, and a mask of those that fall into it."""
    tensor = lookup.tensor
    sizes, offsets = local_box(tensor.shape, tensor.device_mesh, tensor.placements)
    own = lookup.index - offsets[lookup.dim]
    there = (own >= 0) & (own < sizes[lookup.dim])
    return own.clamp(0, max(0, sizes[lookup.dim] - 1)), there


def sum_over_ranks(lookup: Lookup, values: torch.Tensor, there: torch.Tensor) -> DTensor:
    """Sum the results of all ranks; for each element one rank has a value."""
    mesh = lookup.tensor.device_mesh
    masked = torch.where(there, values, torch.zeros((), dtype=values.dtype, device=values.device))
    bits = masked.dtype == torch.bool
    total = all_reduce(masked.to(torch.uint8) if bits else masked, mesh, [lookup.axis])
    return wrap(total.to(torch.bool) if bits else total, mesh, lookup.places, lookup.shape)


WHY = "torch gathers the tensor"
EVERY = "every dim; along the sharded one if that moves fewer bytes than gathering"
RULES = [
    Rule("indexing", ("index.Tensor",), EVERY, f"{WHY}, and hangs if a shard is empty", index),
    Rule("indexing", ("index_select.default",), EVERY, f"{WHY}, and hangs if a shard is empty", index_select),
]
