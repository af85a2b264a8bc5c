"""Convolution of images whose rows or columns are sharded: neighbours exchange the edges that kernels reach over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.call import Call, Spot, is_shard, moved, wrap
from holdfast.spmd.collect import chunk_sizes, gathered
from holdfast.spmd.registry import Rule

WORTH = 4  # shards of fewer rows than this many edges are gathered for less


@dataclass(frozen=True, slots=True)
class Halo:
    """Which dim of the input is sharded over which axis, and how many rows a kernel reaches to each side."""

    dim: int
    axis: int
    reach: int
    places: tuple[Placement, ...]

    @property
    def summed(self) -> list[Placement]:
        """The placements of what is summed over the shards."""
        return [Partial() if is_shard(place) else Replicate() for place in self.places]


def halo_of(call: Call) -> Halo | None:
    """The halo of a call whose result is as long as its input; None where the input has to be gathered."""
    source = call["input"]
    if not isinstance(source, DTensor) or call["transposed"]:
        return None
    axes = [axis for axis, place in enumerate(source.placements) if is_shard(place) and place.dim >= 2]
    if len(axes) != 1:
        return None
    axis = axes[0]
    place = source.placements[axis]
    others = [other for number, other in enumerate(source.placements) if number != axis]
    if not is_shard(place) or not all(isinstance(other, Replicate) or other == Shard(0) for other in others):
        return None
    dim, space = place.dim, place.dim - 2
    reach = call["dilation"][space] * (call["weight"].shape[dim] - 1)
    same_length = call["stride"][space] == 1 and reach == 2 * call["padding"][space]
    sizes = chunk_sizes(source.shape[dim], call.mesh.size(axis))
    if not same_length or min(sizes) < max(WORTH * (reach // 2), 1):
        return None
    if any(other == Shard(0) for other in others) and source.shape[0] < call.mesh.size():
        return None  # an empty batch shard could not take part
    return Halo(dim, axis, reach // 2, tuple(source.placements))


def forward(call: Call, halo: Halo) -> Any:
    """Each rank convolves its rows and its neighbours' edges."""
    extended = _extended(call, halo, moved(call["input"], halo.places, call.mesh))
    tensors: dict[Spot, torch.Tensor] = {(0,): extended}
    for position in (1, 2):
        if call.values[position] is not None:
            tensors[position,] = moved(call.values[position], [Replicate()] * call.mesh.ndim, call.mesh)
    out = call.run(tensors, padding=_padding(call, halo))
    shape = [call["input"].shape[0], *out.shape[1:]]
    shape[halo.dim] = call["input"].shape[halo.dim]
    return wrap(out, call.mesh, halo.places, shape)


def backward(call: Call, halo: Halo) -> Any:
    """The gradients of the edges go back to the neighbours that lent them."""
    source, weight = call["input"], call["weight"]
    extended = _extended(call, halo, moved(source, halo.places, call.mesh))
    tensors: dict[Spot, torch.Tensor] = {
        (0,): moved(call["grad_output"], halo.places, call.mesh),
        (1,): extended,
        (2,): moved(weight, [Replicate()] * call.mesh.ndim, call.mesh),
    }
    inner, of_weight, of_bias = call.run(tensors, padding=_padding(call, halo))
    return (
        None if inner is None else wrap(_returned(call, halo, inner), call.mesh, halo.places, source.shape),
        None if of_weight is None else wrap(of_weight, call.mesh, halo.summed, weight.shape),
        None if of_bias is None else wrap(of_bias, call.mesh, halo.summed, of_bias.shape),
    )


def _padding(call: Call, halo: Halo) -> list[int]:
    return [0 if space == halo.dim - 2 else size for space, size in enumerate(call["padding"])]


def _neighbours(call: Call, halo: Halo, first: torch.Tensor, last: torch.Tensor) -> tuple[Any, Any]:
    """The last edge of the rank before and the first edge of the rank after; None at the ends."""
    coordinate = call.mesh.get_coordinate()
    assert coordinate is not None
    here = coordinate[halo.axis]
    edges = gathered(torch.stack([first, last]), call.mesh, halo.axis)
    before = edges[here - 1, 1] if here else None
    after = edges[here + 1, 0] if here + 1 < len(edges) else None
    return before, after


def _extended(call: Call, halo: Halo, local: torch.Tensor) -> torch.Tensor:
    """This rank's rows between its neighbours' edges; zeros where the image ends."""
    if not halo.reach:
        return local
    first, last = local.narrow(halo.dim, 0, halo.reach), local.narrow(halo.dim, -halo.reach, halo.reach)
    before, after = _neighbours(call, halo, first, last)
    nothing = torch.zeros_like(first)
    parts = [nothing if before is None else before, local, nothing if after is None else after]
    return torch.cat(parts, halo.dim)


def _returned(call: Call, halo: Halo, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of this rank's rows: its own findings, and its neighbours' for the edges that they borrowed."""
    if not halo.reach:
        return gradient
    reach, dim = halo.reach, halo.dim
    own = gradient.narrow(dim, reach, gradient.shape[dim] - 2 * reach).clone()
    first, last = gradient.narrow(dim, 0, reach), gradient.narrow(dim, -reach, reach)
    before, after = _neighbours(call, halo, first, last)
    if before is not None:
        own.narrow(dim, 0, reach).add_(before)
    if after is not None:
        own.narrow(dim, -reach, reach).add_(after)
    return own


RULES: list[Rule] = []  # conv.py asks for a halo first
