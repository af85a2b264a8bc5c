"""Results of reductions, from what a rank has with the reduced dims kept as ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base.call import is_shard, wrap


def named_dims(dims: Sequence[int] | None, ndim: int) -> list[int] | None:
    """The dims of a reduction, counted from the front, all where none is named; None where one device refuses them."""
    if not dims:
        return list(range(ndim))
    if not all(-ndim <= dim < ndim for dim in dims):
        return None
    found = sorted({dim % ndim for dim in dims})
    return found if len(found) == len(dims) else None


def shrunk(part: torch.Tensor, source: DTensor, over: Collection[int], keepdim: bool) -> DTensor:
    """The result that is `part` on this rank: whole along the axes that cut reduced dims of `source`, else as it is."""
    places: list[Placement] = [Replicate() if is_shard(p) and p.dim in over else p for p in source.placements]
    if keepdim:
        return wrap(part, source.device_mesh, places, [1 if d in over else n for d, n in enumerate(source.shape)])
    places = [Shard(p.dim - sum(d < p.dim for d in over)) if is_shard(p) else p for p in places]
    part = part.reshape([size for dim, size in enumerate(part.shape) if dim not in over])
    return wrap(part, source.device_mesh, places, [size for dim, size in enumerate(source.shape) if dim not in over])
