"""`redistribute_cost`: the collectives and bytes of a redistribution, found by torch's own steps on a meta tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.spmd.base import torch_dispatch
from holdfast.spmd.base.spmd_errors import SpmdArgumentError
from holdfast.spmd.sharding.shard_sizes import is_shard

# What each rank receives, as a multiple of its input, by the number of ranks.
RECEIVED = {
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter_tensor": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_to_all_single": lambda ranks: (ranks - 1) / ranks,
    "shard_dim_alltoall": lambda ranks: (ranks - 1) / ranks,
}
NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}


@dataclass(frozen=True, slots=True)
class Move:
    """One collective on one mesh axis, and the bytes that this rank receives."""

    axis: int
    present: Placement
    wanted: Placement
    collective: str  # slice, all_gather, reduce_scatter, all_reduce, all_to_all
    bytes: int


def redistribute_cost(tensor: DTensor, placements: Sequence[Placement]) -> tuple[Move, ...]:
    """Return the moves that redistribute `tensor` to `placements`, in order; empty if it has them already.

    The sum of their bytes is what this rank receives. An axis may have several moves if torch goes through other
    placements. If torch moves several axes at once, over a flattened mesh, the first of them has the bytes. Nothing is
    sent. Raises SpmdArgumentError if the placements do not fit the tensor or the mesh.
    """
    placements = _checked(tensor, placements)
    mesh = tensor.device_mesh
    with torch.no_grad():
        empty = DTensor.from_local(
            torch.empty_like(tensor.to_local(), device="meta"),
            mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        with _CollectiveRecorder(mesh) as recorder:
            empty.redistribute(placements=placements)
    return _moves(tensor.placements, placements, mesh, recorder.recorded)


def _checked(tensor: DTensor, placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements with non-negative dims; raises if the tensor cannot be redistributed to them."""
    if not isinstance(tensor, DTensor):
        raise SpmdArgumentError(f"a {type(tensor).__name__} has no placements: give a DTensor, as of distribute_tensor")
    if not isinstance(placements, Sequence) or not all(isinstance(place, Placement) for place in placements):
        raise SpmdArgumentError(f"placements={placements!r}: give a list of Replicate() and Shard(dim), one per axis")
    axes = tensor.device_mesh.ndim
    if len(placements) != axes:
        raise SpmdArgumentError(f"{len(placements)} placements for a mesh of {axes} axes: give one placement per axis")
    for axis, (before, after) in enumerate(zip(tensor.placements, placements, strict=True)):
        if isinstance(after, Partial) and before != after:
            raise SpmdArgumentError(f"axis {axis}: nothing is redistributed to {after}: ask for Replicate or Shard")
        dim = getattr(after, "dim", 0)
        if not -max(tensor.ndim, 1) <= dim < max(tensor.ndim, 1) or (is_shard(after) and not tensor.ndim):
            raise SpmdArgumentError(f"axis {axis}: {after} of a tensor of {tensor.ndim} dims: name one that it has")
    return tuple(Shard(place.dim % tensor.ndim) if is_shard(place) else place for place in placements)


def _moves(
    present: Sequence[Placement],
    wanted: Sequence[Placement],
    mesh: DeviceMesh,
    recorded: Sequence[tuple[int, str, int]],
) -> tuple[Move, ...]:
    moves = [Move(axis, present[axis], wanted[axis], word, count) for axis, word, count in recorded]
    communicating = {axis for axis, _, _ in recorded}
    for axis, (before, after) in enumerate(zip(present, wanted, strict=True)):
        if before != after and axis not in communicating and mesh.size(axis) > 1:
            moves.append(Move(axis, before, after, "slice", 0))
    return tuple(moves)


class _CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records collectives: the axis, the name, and the bytes that this rank would receive."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded: list[tuple[int, str, int]] = []
        self._axes = {mesh.get_group(axis).group_name: (axis,) for axis in range(mesh.ndim)}
        self._mesh = mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._opname
        if name in RECEIVED:
            axes = self._axes.get(args[-1]) or self._flattened_axes(args[-1])
            ranks = math.prod(self._mesh.size(axis) for axis in axes)
            count = round(args[0].nbytes * RECEIVED[name](ranks))
            self.recorded += [(axis, NAMES.get(name, name), 0 if place else count) for place, axis in enumerate(axes)]
        return func(*args, **(kwargs or {}))

    def _flattened_axes(self, name: str) -> tuple[int, ...]:
        """Return the axes that the group of a flattened mesh spans."""
        ranks = dist.get_process_group_ranks(torch_dispatch.process_group(name))
        places = [(self._mesh.mesh == rank).nonzero()[0].tolist() for rank in ranks]
        return tuple(axis for axis in range(self._mesh.ndim) if len({place[axis] for place in places}) > 1)
