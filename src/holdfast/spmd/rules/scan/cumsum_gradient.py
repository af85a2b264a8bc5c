"""The gradient of a cumsum along a sharded dim, without turning the shards round.

torch's formula is grad.flip(dim).cumsum(dim).flip(dim). Each flip would send every shard across the mesh, and the
second would send it back. Between the two a Turned stands for the flipped tensor: every rank keeps its own rows, turned
round by themselves, and knows that the ranks count from the last. None but that formula ever sees one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, replicated, whole, wrap
from holdfast.spmd.sharding.byte_costs import exact_dtype, gathering_pays, is_cut
from holdfast.spmd.sharding.mesh_collectives import gathered, sharded_axes

ATEN = torch.ops.aten
FORMULA = "CumsumBackward"
TOTALS = 2  # numbers per row: one forward, one backward


class Turned(DTensor):
    """A DTensor whose shards lie in the opposite order of the ranks."""

    __slots__ = ("_turned_dim",)

    _turned_dim: int

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        turned = args[0] if args else None
        if isinstance(turned, Turned) and not kwargs:
            dim, ndim = turned._turned_dim, turned.ndim
            if func is ATEN.cumsum.default and args[1] % ndim == dim:
                axis = sharded_axes(turned.placements, (dim,))[0]
                local = private.local_of(turned)
                return _as_turned(running(local, turned.device_mesh, axis, dim, after=True), turned, dim)
            if func is ATEN.flip.default and [d % ndim for d in args[1]] == [dim]:
                return _straight(turned)
        return func(*(_flipped(arg) for arg in args), **(kwargs or {}))


def running(own: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int, *, after: bool = False) -> torch.Tensor:
    """This rank's part of a cumsum, to which the totals of the ranks before it (or after it) are added."""
    exact = own.to(exact_dtype(own.dtype))
    totals = gathered(exact.sum(dim, keepdim=True), mesh, axis)
    here = mesh.get_local_rank(axis)
    others = totals[here + 1 :] if after else totals[:here]
    return (exact.cumsum(dim) + others.sum(0)).to(own.dtype)


def may_stay_cut(tensor: Any, dim: int) -> bool:
    """Whether one axis cuts the scanned dim, and into shards so long that two totals are less than to gather them."""
    if not is_cut(tensor, (dim,)) or len(sharded_axes(tensor.placements, (dim,))) > 1:
        return False
    return gathering_pays(tensor, (dim,), TOTALS * exact_dtype(tensor.dtype).itemsize)


def turn_shards(tensor: Any, dims: list[int]) -> Any:
    """The first flip of the formula; LEAVE for any other flip."""
    if not private.in_gradient(FORMULA) or type(tensor) is not DTensor or len(dims) != 1:
        return LEAVE
    dim = dims[0] % tensor.ndim
    return _as_turned(private.local_of(tensor).flip(dim), tensor, dim) if may_stay_cut(tensor, dim) else LEAVE


def _as_turned(local: torch.Tensor, like: DTensor, dim: int) -> Turned:
    spec = private.spec_of(wrap(local, like.device_mesh, like.placements, like.shape))
    turned: Turned = private.wrap_as(Turned, local.contiguous(), spec)
    turned._turned_dim = dim
    return turned


def _straight(turned: Turned) -> DTensor:
    """What a Turned is the flip of."""
    return wrap(private.local_of(turned).flip(turned._turned_dim), turned.device_mesh, turned.placements, turned.shape)


def _flipped(value: Any) -> Any:
    """The tensor that a Turned stands for, on every rank: where something else than the formula comes across one."""
    if not isinstance(value, Turned):
        return value
    return replicated(whole(_straight(value)).flip(value._turned_dim), value.device_mesh)
