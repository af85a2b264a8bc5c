"""cumsum of shards and its gradient along a sharded dim, without exchanging shards for the formula's flips.

torch's formula is grad.flip(dim).cumsum(dim).flip(dim). Each flip would send every shard across the mesh, and the
second would send it back. Between the two a FlippedShards stands for the flipped tensor: every rank keeps its own rows,
flipped locally, and the ranks count from the last. Only that formula ever sees one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_dispatch, torch_specs
from holdfast.spmd.base.call import USE_TORCH
from holdfast.spmd.base.torch_autograd import in_gradient
from holdfast.spmd.base.torch_specs import local_of, spec_of
from holdfast.spmd.sharding.byte_costs import accumulation_dtype, gathering_is_cheaper, is_sharded_along
from holdfast.spmd.sharding.local_parts import full_tensor, replicated, wrap
from holdfast.spmd.sharding.mesh_collectives import all_gather
from holdfast.spmd.sharding.plain_tensors import dispatch_again
from holdfast.spmd.sharding.shard_sizes import sharded_axes

ATEN = torch.ops.aten
FORMULA = "CumsumBackward"
TOTALS = 2  # numbers per row: one forward, one backward


class FlippedShards(DTensor):
    """A DTensor whose shards are in the reverse order of the ranks."""

    __slots__ = ("_flipped_dim",)

    _flipped_dim: int

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        flipped = args[0] if args else None
        if isinstance(flipped, FlippedShards) and not kwargs:
            dim, ndim = flipped._flipped_dim, flipped.ndim
            if func is ATEN.cumsum.default and args[1] % ndim == dim:
                axis = sharded_axes(flipped.placements, (dim,))[0]
                local = local_of(flipped)
                return _as_flipped(sharded_cumsum(local, flipped.device_mesh, axis, dim, after=True), flipped, dim)
            if func is ATEN.flip.default and [d % ndim for d in args[1]] == [dim]:
                return _unflipped(flipped)
        return func(*(_materialized(arg) for arg in args), **(kwargs or {}))


def sharded_cumsum(own: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int, *, after: bool = False) -> torch.Tensor:
    """Return this rank's part of a cumsum, with the totals of the ranks before it (or after it) added."""
    exact = own.to(accumulation_dtype(own.dtype))
    totals = all_gather(exact.sum(dim, keepdim=True), mesh, axis)
    here = mesh.get_local_rank(axis)
    others = totals[here + 1 :] if after else totals[:here]
    return (exact.cumsum(dim) + others.sum(0)).to(own.dtype)


def may_stay_sharded(tensor: Any, dim: int) -> bool:
    """Return True if one axis shards the scanned dim, and two totals cost less than gathering the shards."""
    if not is_sharded_along(tensor, (dim,)) or len(sharded_axes(tensor.placements, (dim,))) > 1:
        return False
    return gathering_is_cheaper(tensor, (dim,), TOTALS * accumulation_dtype(tensor.dtype).itemsize)


def flip_shards(tensor: Any, dims: list[int]) -> Any:
    """Run the first flip of the formula; return USE_TORCH for any other flip."""
    if not in_gradient(FORMULA) or type(tensor) is not DTensor or len(dims) != 1:
        return USE_TORCH
    dim = dims[0] % tensor.ndim
    return _as_flipped(local_of(tensor).flip(dim), tensor, dim) if may_stay_sharded(tensor, dim) else USE_TORCH


def _as_flipped(local: torch.Tensor, like: DTensor, dim: int) -> FlippedShards:
    spec = spec_of(wrap(local, like.device_mesh, like.placements, like.shape))
    flipped: FlippedShards = torch_specs.wrap_as(FlippedShards, local.contiguous(), spec)
    flipped._flipped_dim = dim
    return flipped


def _unflipped(flipped: FlippedShards) -> DTensor:
    """Return the tensor of which a FlippedShards is the flip."""
    return wrap(local_of(flipped).flip(flipped._flipped_dim), flipped.device_mesh, flipped.placements, flipped.shape)


def _materialized(value: Any) -> Any:
    """Return the flipped tensor, replicated, for anything but the formula that uses a FlippedShards."""
    if not isinstance(value, FlippedShards):
        return value
    return replicated(full_tensor(_unflipped(value)).flip(value._flipped_dim), value.device_mesh)


def flip_locally_in_gradients() -> None:
    """From now on let the gradients of scans flip shards locally."""
    torch_dispatch.handlers().setdefault(torch.ops.aten.flip.default, flip_in_gradient)


def flip_in_gradient(op: Any, args: Any, kwargs: Any) -> Any:
    flipped = flip_shards(*args)
    return dispatch_again(op, args, kwargs) if flipped is USE_TORCH else flipped
