"""DTensor redistribution of dims with strided shards: gathered, moved as a dim without shards, and split again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate

from holdfast.spmd.base.torch_modes import is_tracing, simulates_ranks
from holdfast.spmd.base.torch_specs import make_spec
from holdfast.spmd.sharding.mesh_collectives import all_gather
from holdfast.spmd.sharding.shard_sizes import is_shard, sharded_dim


def move_strided_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Redistribute dims with strided shards apart from the others.

    torch mistakes a strided shard for a plain one as soon as another axis begins or ceases to shard its dim: ranks get
    other rows, raise, or wait for each other.
    """

    def redistribute_local_tensor(local: torch.Tensor, present: Any, wanted: Any, **options: Any) -> torch.Tensor:
        dims = _moved_dims(present.placements, wanted.placements)
        if not dims or is_tracing() or simulates_ranks():
            return original(local, present, wanted, **options)  # type: ignore[no-any-return]
        for dim in dims:
            local = _gather(local, present, dim)
        between, after = _without_shards(present, dims), _without_shards(wanted, dims)
        if between.placements != after.placements:
            local = original(local, between, after, **{**options, "async_op": False})
        for dim in dims:
            local = _split(local, wanted, dim)
        return local.contiguous()

    return redistribute_local_tensor


def _moved_dims(present: Sequence[Placement], wanted: Sequence[Placement]) -> set[int]:
    """Return the dims that have strided shards and change, unless torch gathers one strided shard right."""
    strided = [
        sharded_dim(place) for place in (*present, *wanted) if sharded_dim(place) is not None and not is_shard(place)
    ]
    if not strided:
        return set()
    moves = [(now, then) for now, then in zip(present, wanted, strict=True) if now != then]
    moved = {sharded_dim(place) for move in moves for place in move}
    return {
        dim
        for dim in moved
        if dim is not None
        and dim in strided
        and (strided.count(dim) > 1 or any(sharded_dim(then) == dim for then in wanted))
    }


def _without_shards(spec: Any, dims: set[int]) -> Any:
    places = [Replicate() if sharded_dim(place) in dims else place for place in spec.placements]
    meta = spec.tensor_meta
    return make_spec(spec.mesh, places, meta.shape, meta.stride, meta.dtype)


def _gather(local: torch.Tensor, spec: Any, dim: int) -> torch.Tensor:
    """Return a local tensor with all rows of a dim, gathered over the axes that shard it, the last first."""
    coordinate, count = spec.mesh.get_coordinate(), spec.shape[dim]
    parts: list[tuple[int, int, list[torch.Tensor]]] = []  # axis, rows before it splits them, where each rank's are
    for axis, place in enumerate(spec.placements):
        if sharded_dim(place) == dim:
            places = _chunks(torch.arange(count), place, spec.mesh.size(axis), 0)
            parts.append((axis, count, places))
            count = len(places[coordinate[axis]])
    for axis, count, places in reversed(parts):
        longest = max(map(len, places))
        padded = local.new_zeros([longest if d == dim else size for d, size in enumerate(local.shape)])
        padded.narrow(dim, 0, local.shape[dim]).copy_(local)
        gathered = all_gather(padded, spec.mesh, axis)
        local = local.new_empty([count if d == dim else size for d, size in enumerate(local.shape)])
        for own, part in zip(places, gathered, strict=True):
            local.index_copy_(dim, own.to(local.device), part.narrow(dim, 0, len(own)))
    return local


def _split(local: torch.Tensor, spec: Any, dim: int) -> torch.Tensor:
    """Return this rank's rows of a dim of which it has all."""
    coordinate = spec.mesh.get_coordinate()
    for axis, place in enumerate(spec.placements):
        if sharded_dim(place) == dim:
            local = _chunks(local, place, spec.mesh.size(axis), dim)[coordinate[axis]]
    return local


def _chunks(rows: torch.Tensor, place: Placement, ranks: int, dim: int) -> list[torch.Tensor]:
    """Return the rows of each rank of an axis, as torch divides them."""
    along: Any = type(place)(dim) if is_shard(place) else type(place)(dim, split_factor=place.split_factor)  # type: ignore[attr-defined, call-arg]
    return along._split_tensor(rows, ranks, with_padding=False)[0]  # type: ignore[no-any-return]
