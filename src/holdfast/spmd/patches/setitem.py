"""y[1:3] = v for ints and slices: each rank writes its own part, and nothing is gathered but v."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import is_shard, moved, whole
from holdfast.spmd.base.collective_errors import named
from holdfast.spmd.sharding.gathered_views import Window
from holdfast.spmd.sharding.partials import is_partial, share

Bounds = tuple[tuple[int, int, int, bool], ...]  # start, stop, step, and whether an int chose it: for each dim


def set_item(self: DTensor, key: Any, value: Any) -> None:
    """DTensor.__setitem__: what is no plain region goes torch's way, through windows."""
    if private.is_tracing() and any(type(size) is not int for size in self.shape):
        raise private.out_of_graph(torch.ops.aten.copy_.default)  # which part of a symbolic size is whose is not known
    bounds = _bounds(key, self.shape)
    regular = isinstance(value, (int, float, bool, torch.Tensor))
    boxed = all(is_shard(place) or isinstance(place, (Replicate, Partial)) for place in self.placements)
    outside = private.simulates_ranks() or self.device_mesh.get_coordinate() is None
    if bounds is None or not regular or not boxed or outside or isinstance(self, Window):
        torch.Tensor.__setitem__(self, key, value)
        return
    with named("DTensor.__setitem__, x[a:b] = v,", self):
        _Put.apply(self, value, bounds, key)  # type: ignore[no-untyped-call]


def _bounds(key: Any, shape: torch.Size) -> Bounds | None:
    """The region that a key of ints, slices and one ellipsis names; None for any other key."""
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
    """The slices of this rank's part that lie in the region, and the slices of the region that they are."""
    sizes, offsets = private.local_box(tensor.shape, tensor.device_mesh, tensor.placements)
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
    """Writes into a region of a DTensor in place."""

    @staticmethod
    def forward(ctx: Any, target: DTensor, value: Any, bounds: Bounds, key: Any) -> DTensor:
        if is_partial(target):
            own = whole(value) if isinstance(value, torch.Tensor) else private.local_of(target).new_tensor(value)
            _write(target, share(target, own), bounds)
        else:
            _put(target, value, bounds)
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


def _put(target: DTensor, value: Any, bounds: Bounds) -> None:
    """Write a value into a region; of one as large as the region a rank needs only what lies beside its own part."""
    if not isinstance(value, DTensor) or list(value.shape) != _region(bounds):
        _write(target, whole(value) if isinstance(value, torch.Tensor) else value, bounds)
        return
    kept = [dim for dim, (*_, chosen) in enumerate(bounds) if not chosen]
    entire = [dim for dim in kept if bounds[dim][:3] == (0, target.shape[dim], 1)]
    places = [
        Shard(kept.index(place.dim)) if is_shard(place) and place.dim in entire else Replicate()
        for place in target.placements
    ]
    beside = moved(value, places, target.device_mesh)
    if (own := _own(bounds, target)) is not None:
        here, there = own
        region = private.local_of(target)[here]
        wanted = tuple(slice(None) if dim in entire else part for dim, part in zip(kept, there, strict=True))
        region.copy_(beside[wanted].reshape(region.shape))


def _region(bounds: Bounds) -> list[int]:
    """The shape of a region; a dim chosen by an int is gone."""
    return [-(-(stop - start) // step) for start, stop, step, chosen in bounds if not chosen]


def _write(target: Any, value: Any, bounds: Bounds) -> None:
    own = _own(bounds, target)
    if isinstance(value, torch.Tensor):  # also where this rank has no part: a value that does not fit raises on all
        shape = _region(bounds)
        while value.ndim > len(shape) and value.shape[0] == 1:
            value = value[0]
        value = value.expand(shape)
    if own is None:
        return
    here, there = own
    if isinstance(value, torch.Tensor):
        region = private.local_of(target)[here]
        region.copy_(value[there].reshape(region.shape))
    else:
        private.local_of(target)[here] = value
