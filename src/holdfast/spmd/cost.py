"""What a redistribution will move, before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from holdfast.core.errors import InvalidArgument
from holdfast.spmd.call import is_shard
from holdfast.spmd.ways import axis_cost


@dataclass(frozen=True, slots=True)
class Move:
    """What happens on one mesh axis, and the bytes that each of its ranks receives."""

    axis: int
    present: Placement
    wanted: Placement
    collective: str  # slice, all_gather, reduce_scatter, all_reduce, all_to_all
    bytes: int


def redistribute_cost(tensor: DTensor, placements: Sequence[Placement]) -> tuple[Move, ...]:
    """The moves that take `tensor` to `placements`; empty when it is there already.

    The sum of their bytes is what one rank receives. Raises InvalidArgument when the placements do not fit the mesh.
    """
    if len(placements) != tensor.device_mesh.ndim:
        raise InvalidArgument(
            f"{len(placements)} placements for a mesh of {tensor.device_mesh.ndim} axes: give one placement per axis"
        )
    return moves(tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements, placements)


def moves(
    shape: torch.Size, dtype: torch.dtype, mesh: DeviceMesh, present: Sequence[Placement], wanted: Sequence[Placement]
) -> tuple[Move, ...]:
    """The moves between two placements of a tensor that need not exist."""
    found = []
    for axis, (before, after) in enumerate(zip(present, wanted, strict=True)):
        if before == after or mesh.size(axis) == 1:
            continue
        if isinstance(after, Partial):
            raise InvalidArgument(f"axis {axis}: nothing is redistributed to {after}: ask for Replicate or Shard")
        held = shape.numel() * dtype.itemsize
        for other, place in enumerate(present):
            if other != axis and is_shard(place) and is_shard(wanted[other]):
                held = -(-held // mesh.size(other))
        cost = axis_cost(before, after, held, mesh.size(axis))
        found.append(Move(axis, before, after, _collective(before, after), round(cost)))
    return tuple(found)


def _collective(before: Placement, after: Placement) -> str:
    if isinstance(before, Replicate):
        return "slice"
    if isinstance(before, Partial):
        return "reduce_scatter" if is_shard(after) else "all_reduce"
    return "all_to_all" if is_shard(after) else "all_gather"
