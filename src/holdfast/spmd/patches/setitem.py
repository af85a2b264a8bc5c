"""DTensor.__setitem__, y[1:3] = v, for ints and slices: each rank writes its own rows, and only v is gathered."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from holdfast.spmd.base.collective_errors import naming
from holdfast.spmd.base.spmd_errors import UnsupportedCall
from holdfast.spmd.base.torch_modes import is_tracing, out_of_graph, refuse_rank_in_shared_graph, simulates_ranks
from holdfast.spmd.base.torch_specs import local_box, local_of, storage_id
from holdfast.spmd.sharding.gathered_views import GatheredView
from holdfast.spmd.sharding.local_parts import full_tensor, local_part
from holdfast.spmd.sharding.partials import is_partial, own_share
from holdfast.spmd.sharding.shard_sizes import is_shard

Bounds = tuple[tuple[int, int, int, bool], ...]  # for each dim: start, stop, step, and whether an int selects it


def set_item(self: DTensor, key: Any, value: Any) -> None:
    """DTensor.__setitem__; keys other than ints and slices take torch's path, through gathered views."""
    if is_tracing():
        _check_trace(self, value)
    bounds = _bounds(key, self.shape)
    regular = isinstance(value, (int, float, bool, torch.Tensor))
    boxed = all(is_shard(place) or isinstance(place, (Replicate, Partial)) for place in self.placements)
    if simulates_ranks() and bounds is not None and _selects_rows(self, bounds):
        raise UnsupportedCall("x[a:b] = v along a sharded dim, where torch simulates all ranks (LocalTensorMode)")
    outside = simulates_ranks() or self.device_mesh.get_coordinate() is None
    if bounds is None or not regular or not boxed or outside or isinstance(self, GatheredView):
        torch.Tensor.__setitem__(self, key, value)
        return
    with naming("DTensor.__setitem__, x[a:b] = v,", self):
        _Put.apply(self, value, bounds, key)  # type: ignore[no-untyped-call]


def _selects_rows(target: DTensor, bounds: Bounds) -> bool:
    """Return True if a region has only some rows of a sharded dim: torch would write into a copy of them."""
    dims = {place.dim for place in target.placements if isinstance(place, Shard)}
    return any(bounds[dim] != (0, target.shape[dim], 1, False) for dim in dims)


def _check_trace(target: DTensor, value: Any) -> None:
    """Leave the graph where a write cannot be traced: AOT autograd sees the new values, but not whose gradient ends."""
    refuse_rank_in_shared_graph()
    if any(type(size) is not int for size in target.shape):
        raise out_of_graph(torch.ops.aten.copy_.default, "the shards of a symbolic size are unknown")
    tensors = (target, value) if isinstance(value, torch.Tensor) else (target,)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise out_of_graph(torch.ops.aten.copy_.default, "x[a:b] = v writes into a tensor that has a gradient")


def _bounds(key: Any, shape: torch.Size) -> Bounds | None:
    """Return the region that a key of ints, slices and one ellipsis selects; None for any other key."""
    items = list(key) if isinstance(key, tuple) else [key]
    if any(not isinstance(item, (slice, EllipsisType)) and type(item) is not int for item in items):
        return None
    if sum(item is Ellipsis for item in items) > 1 or len(items) - (Ellipsis in items) > len(shape):
        return None
    place = items.index(Ellipsis) if Ellipsis in items else len(items)
    missing = len(shape) - len(items) + (Ellipsis in items)
    items = [*items[:place], *[slice(None)] * missing, *items[place + 1 :]]
    bounds = []
    for item, size in zip(items, shape, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 0:
                return None
            bounds.append((start, max(stop, start), step, False))
        elif not -size <= item < size:
            return None
        else:
            bounds.append((item % size, item % size + 1, 1, True))
    return tuple(bounds)


def _own(bounds: Bounds, tensor: DTensor) -> tuple[tuple[slice, ...], tuple[Any, ...]] | None:
    """Return the slices of this rank's shard within the region, and the same elements as slices of the region."""
    sizes, offsets = local_box(tensor.shape, tensor.device_mesh, tensor.placements)
    here, there = [], []
    for (start, stop, step, chosen), size, offset in zip(bounds, sizes, offsets, strict=True):
        skipped = max(0, -(-(offset - start) // step))
        first = start + skipped * step
        count = max(0, -(-(min(stop, offset + size) - first) // step))
        if size == 0 or count == 0:
            return None
        here.append(slice(first - offset, first - offset + (count - 1) * step + 1, step))
        if not chosen:
            there.append(slice(skipped, skipped + count))
    return tuple(here), tuple(there)


class _Put(torch.autograd.Function):
    """Write into a region of a DTensor in place."""

    @staticmethod
    def forward(ctx: Any, target: DTensor, value: Any, bounds: Bounds, key: Any) -> DTensor:
        if is_partial(target):
            own = full_tensor(value) if isinstance(value, torch.Tensor) else local_of(target).new_tensor(value)
            _write(target, own_share(target, own), bounds)
        else:
            _write_own_region(target, value, bounds)
        ctx.bounds, ctx.key = bounds, key
        ctx.shape = value.shape if isinstance(value, torch.Tensor) else None
        ctx.is_plain = not isinstance(value, DTensor)
        ctx.mark_dirty(target)
        return target

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        kept: Any = None
        inner: Any = None
        if ctx.needs_input_grad[1]:
            inner = gradient[ctx.key].sum_to_size(ctx.shape)
            inner = inner.full_tensor() if ctx.is_plain else inner
        if ctx.needs_input_grad[0]:
            kept = gradient.clone()
            kept = _Put.apply(kept, 0.0, ctx.bounds, ctx.key)  # type: ignore[no-untyped-call]
        return kept, inner, None, None


def _write_own_region(target: DTensor, value: Any, bounds: Bounds) -> None:
    """Write a value into a region; redistribute a value of the region's shape next to the target's shards."""
    if not isinstance(value, DTensor) or list(value.shape) != _region(bounds):
        _write(target, full_tensor(value) if isinstance(value, torch.Tensor) else value, bounds)
        return
    kept = [dim for dim, (*_, chosen) in enumerate(bounds) if not chosen]
    entire = [dim for dim in kept if bounds[dim][:3] == (0, target.shape[dim], 1)]
    places = [
        Shard(kept.index(place.dim)) if is_shard(place) and place.dim in entire else Replicate()
        for place in target.placements
    ]
    aligned = local_part(value, places, target.device_mesh)
    if (own := _own(bounds, target)) is not None:
        here, there = own
        region = local_of(target)[here]
        wanted = tuple(slice(None) if dim in entire else part for dim, part in zip(kept, there, strict=True))
        _fill(region, aligned[wanted])


def _fill(region: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a region of this rank's shard.

    A value in the same storage is cloned first: it may overlap the region on some ranks only, and copy_ would raise
    there. `x[a:b] += v` assigns the region to itself.
    """
    value = value.reshape(region.shape)
    region.copy_(value.clone() if storage_id(value) == storage_id(region) else value)


def _region(bounds: Bounds) -> list[int]:
    """Return the shape of a region, without the dims that an int selects."""
    return [-(-(stop - start) // step) for start, stop, step, chosen in bounds if not chosen]


def _write(target: Any, value: Any, bounds: Bounds) -> None:
    own = _own(bounds, target)
    if isinstance(value, torch.Tensor):  # on ranks without a share too: a value that does not fit raises on all
        shape = _region(bounds)
        while value.ndim > len(shape) and value.shape[0] == 1:
            value = value[0]
        value = value.expand(shape)
    if own is None:
        return
    here, there = own
    if isinstance(value, torch.Tensor):
        _fill(local_of(target)[here], value[there])
    else:
        local_of(target)[here] = value
