"""Dims of a reduction, and its result wrapped from local results that keep the reduced dims with size 1."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.sharding.local_parts import wrap
from holdfast.spmd.sharding.shard_sizes import is_shard


def reduced_dims(dims: Sequence[int] | None, ndim: int) -> list[int] | None:
    """Return the non-negative dims of a reduction, all if none is given; None for dims that one device refuses."""
    if not dims:
        return list(range(ndim))
    if not all(-ndim <= dim < ndim for dim in dims):
        return None
    unique = sorted({dim % ndim for dim in dims})
    return unique if len(unique) == len(dims) else None


def reduced_result(local: torch.Tensor, source: DTensor, over: Collection[int], keepdim: bool) -> DTensor:
    """Wrap this rank's result: replicated on the axes that shard a reduced dim, else placed as `source`."""
    places: list[Placement] = [Replicate() if is_shard(p) and p.dim in over else p for p in source.placements]
    if keepdim:
        return wrap(local, source.device_mesh, places, [1 if d in over else n for d, n in enumerate(source.shape)])
    places = [Shard(p.dim - sum(d < p.dim for d in over)) if is_shard(p) else p for p in places]
    local = local.reshape([size for dim, size in enumerate(local.shape) if dim not in over])
    return wrap(local, source.device_mesh, places, [size for dim, size in enumerate(source.shape) if dim not in over])
