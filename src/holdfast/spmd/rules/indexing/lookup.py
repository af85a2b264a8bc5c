"""x[i], index_select and gather along the sharded dim: each rank looks up what it has, and the findings are added.

Fewer bytes than the tensor itself where less is asked for than a part of it; where more is, the tensor is gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, is_shard, moved, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.rules import torch_2_11
from holdfast.spmd.rules.along.one_dim import picked
from holdfast.spmd.rules.indexing import bounds
from holdfast.spmd.rules.indexing.bounds import is_everywhere, is_in_range
from holdfast.spmd.rules.pointwise.pointwise import LETTERS
from holdfast.spmd.sharding.index_checks import MASKS
from holdfast.spmd.sharding.mesh_collectives import largest_part, reduced, sharded_axes
from holdfast.spmd.sharding.signature import FIXED, Signature, run_sharded


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is looked into along a dim that one mesh axis shards, by which indices, and how the result lies."""

    tensor: DTensor
    dim: int
    axis: int
    index: torch.Tensor  # this rank's, none negative
    shape: tuple[int, ...]
    places: tuple[Placement, ...]

    @property
    def pays(self) -> bool:
        """Whether to add up the results is less than to gather shards, all padded to the longest.

        By what the rank with the most has, not by this rank's part, which may be empty: all must decide alike.
        """
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        idle = math.prod(mesh.size(axis) for axis, place in enumerate(placements) if place.is_replicate())
        asked = largest_part(self.shape, mesh, self.places) * idle  # torch may cut another dim by idle axes
        return 2 * asked <= mesh.size(self.axis) * largest_part(self.tensor.shape, mesh, placements)

    @property
    def is_in_range(self) -> bool:
        """Whether the indices are; where not, the common way raises."""
        return is_in_range(self.index, 0, self.tensor.shape[self.dim] - 1)


def only_axis(tensor: Any, dim: int) -> int | None:
    """The one mesh axis that shards `dim` of a tensor without Partials; None for any other tensor."""
    if not isinstance(tensor, DTensor) or not all(is_shard(p) or p.is_replicate() for p in tensor.placements):
        return None
    axes = sharded_axes(tensor.placements, (dim,))
    return axes[0] if len(axes) == 1 else None


def by_key(call: Call) -> Any:
    """x[:, i]: one tensor of integers."""
    keys = [(dim, key) for dim, key in enumerate(call["indices"]) if key is not None]
    if len(keys) == 1 and keys[0][1].dtype not in MASKS:
        found = _slices(call, *keys[0])
        if found is not None:
            return found
    return torch_2_11.index(call) if private.is_oldest() else bounds.checked(call)


def by_number(call: Call) -> Any:
    """index_select."""
    tensor = call.values[0]
    if tensor.ndim and call["index"].ndim == 1:
        found = _slices(call, call["dim"] % tensor.ndim, call["index"])
        if found is not None:
            return found
    return torch_2_11.select(call) if private.is_oldest() else bounds.checked(call)


def _slices(call: Call, dim: int, index: Any) -> Any:
    """Whole slices of a tensor: the indices' dims stand in the place of `dim`."""
    tensor = call.values[0]
    axis = only_axis(tensor, dim)
    if axis is None or not is_everywhere(index) or tensor.dtype.is_complex:
        return None
    numbers = moved(index, [Replicate()] * call.mesh.ndim, call.mesh).long()
    numbers = torch.where(numbers < 0, numbers + tensor.shape[dim], numbers)
    shape = (*tensor.shape[:dim], *numbers.shape, *tensor.shape[dim + 1 :])
    later = numbers.ndim - 1
    places = [_kept(place, dim, later) for place in tensor.placements]
    lookup = Lookup(tensor, dim, axis, numbers, shape, tuple(places))
    if not lookup.pays or not lookup.is_in_range:
        return None
    own, there = _own(lookup)
    local = private.local_of(tensor)
    sizes = (*local.shape[:dim], *numbers.shape, *local.shape[dim + 1 :])
    rows = local.index_select(dim, own.flatten()).reshape(sizes) if local.shape[dim] else local.new_zeros(sizes)
    return _added(lookup, rows, there.reshape(*there.shape, *(1,) * (tensor.ndim - dim - 1)))


def _kept(place: Placement, dim: int, later: int) -> Placement:
    if not is_shard(place) or place.dim == dim:
        return Replicate()
    return Shard(place.dim + later) if place.dim > dim else place


def by_element(call: Call) -> Any:
    """gather; one number a row is left a sum, which may be read more than once, as torch's own may not."""
    tensor, index = call.values[0], call["index"]
    if not tensor.ndim or tensor.ndim != index.ndim or tensor.dtype.is_complex:
        return picked(call)
    dim = call["dim"] % tensor.ndim
    axis, single = only_axis(tensor, dim), index.shape[dim] == 1
    if axis is None or not (single or is_everywhere(index)):
        return picked(call) if is_everywhere(index) else _beside(call, dim)
    places = tuple(Replicate() if place == Shard(dim) else place for place in tensor.placements)
    if any(is_shard(place) and index.shape[place.dim] != tensor.shape[place.dim] for place in places):
        return picked(call)
    lookup = Lookup(tensor, dim, axis, moved(index, places, call.mesh), tuple(index.shape), places)
    if not lookup.pays:
        return picked(call)
    if not lookup.is_in_range:
        raise RuntimeError(f"index is out of bounds for dimension {dim} with size {tensor.shape[dim]}")
    own, there = _own(lookup)
    local = private.local_of(tensor)
    numbers = local.gather(dim, own) if local.shape[dim] else local.new_zeros(own.shape)
    if not single or not numbers.is_floating_point():  # torch divides integers to add them to a sum
        return _added(lookup, numbers, there)
    sums = [Partial() if number == axis else place for number, place in enumerate(places)]
    return wrap(numbers.masked_fill(~there, 0), call.mesh, sums, lookup.shape)


def _beside(call: Call, dim: int) -> Any:
    """One number a row, the indices sharded: torch may cut the tensor, and then mixes up the masks of its sums."""
    tensor, index = call.values[0], call["index"]
    others = [place for place in range(tensor.ndim) if place != dim]
    if index.shape[dim] != 1 or any(tensor.shape[place] != index.shape[place] for place in others):
        return picked(call)
    letters = "".join(FIXED if place == dim else LETTERS[place] for place in range(tensor.ndim))
    free = letters.replace(FIXED, "")
    return run_sharded(call, Signature((letters, letters), (letters,), free, sums=((0,), (0,))))


def _own(lookup: Lookup) -> tuple[torch.Tensor, torch.Tensor]:
    """Where on this rank the indices point, and which of them do."""
    tensor = lookup.tensor
    sizes, offsets = private.local_box(tensor.shape, tensor.device_mesh, tensor.placements)
    own = lookup.index - offsets[lookup.dim]
    there = (own >= 0) & (own < sizes[lookup.dim])
    return own.clamp(0, max(0, sizes[lookup.dim] - 1)), there


def _added(lookup: Lookup, found: torch.Tensor, there: torch.Tensor) -> DTensor:
    """The findings of all ranks, of which for each number one has any."""
    mesh = lookup.tensor.device_mesh
    masked = torch.where(there, found, torch.zeros((), dtype=found.dtype, device=found.device))
    bits = masked.dtype == torch.bool
    total = reduced(masked.to(torch.uint8) if bits else masked, mesh, [lookup.axis])
    return wrap(total.to(torch.bool) if bits else total, mesh, lookup.places, lookup.shape)


WHY = "torch gathers the tensor"
EVERY = "every dim; along the sharded one where less is asked for than gathering sends"
RULES = [
    Rule("indexing", ("index.Tensor",), EVERY, f"{WHY}, and hangs where a part is empty", by_key),
    Rule("indexing", ("index_select.default",), EVERY, f"{WHY}, and hangs where a part is empty", by_number),
    Rule("along", ("gather.default",), EVERY, f"{WHY}, and pairs shards of dims that differ in length", by_element),
]
