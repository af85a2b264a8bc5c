"""Halos: rows of other ranks that a kernel or pooling window needs at the edges of a shard, and their gradients.

Any stride, dilation and padding, also transposed, and sizes that do not divide: each rank computes which rows of the
result are its own and which rows of the input they need, and fetches these from their owners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from holdfast.spmd.sharding.row_exchange import RowExchange, Span, pad_rows, shard_spans
from holdfast.spmd.sharding.shard_sizes import is_shard


@dataclass(frozen=True, slots=True)
class Halo:
    """One sharded dim of an image on its way through a kernel."""

    exchange: RowExchange
    places: tuple[Placement, ...]
    size: int  # of the result along the dim, on one device
    results: Span  # this rank's rows of the result
    before: int  # rows of padding before this rank's rows
    after: int

    @property
    def dim(self) -> int:
        return self.exchange.dim

    @property
    def summed(self) -> list[Placement]:
        """Return the placements of values that are summed over the shards."""
        return [Partial() if is_shard(place) else Replicate() for place in self.places]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, or a pooling window, along one dim."""

    size: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        return self.dilation * (self.size - 1) + 1

    def results(self, length: int, *, ceil: bool = False) -> int:
        """Return the number of results for an input of `length`."""
        room = length + 2 * self.padding - self.reach
        count = (-(-room // self.stride) if ceil else room // self.stride) + 1
        if ceil and (count - 1) * self.stride >= length + self.padding:
            count -= 1  # a window that would start in the padding after the end
        return count

    def sources(self, results: Span) -> Span:
        """Return the rows, padding included, that some results need."""
        if not results.size:
            return Span(0, 0)
        first = results.start * self.stride - self.padding
        return Span(first, (results.stop - 1) * self.stride - self.padding + self.reach)


def sharded_image(source: Any) -> tuple[int, int] | None:
    """Return the only sharded spatial dim and its mesh axis; besides it only the batch may be sharded."""
    if not isinstance(source, DTensor) or source.ndim < 3:
        return None
    axes = [axis for axis, place in enumerate(source.placements) if is_shard(place) and place.dim >= 2]
    if len(axes) != 1:
        return None
    others = [place for axis, place in enumerate(source.placements) if axis != axes[0]]
    if not all(place.is_replicate() or place == Shard(0) for place in others):
        return None
    place = source.placements[axes[0]]
    assert is_shard(place)
    return place.dim, axes[0]


def halo_over(source: DTensor, dim: int, axis: int, size: int, sources: Any) -> Halo | None:
    """Return the halo of a kernel that gives `size` results; None if some rank would have none."""
    mesh = source.device_mesh
    ranks = mesh.size(axis)
    if size < ranks or 0 in (span.size for span in shard_spans(size, ranks)):
        return None
    length = source.shape[dim]
    results = shard_spans(size, ranks)
    reached = [sources(span) for span in results]
    wants = tuple(span.within(Span(0, length)) for span in reached)
    exchange = RowExchange(mesh, axis, dim, tuple(shard_spans(length, ranks)), wants)
    here = exchange.here
    before = max(0, min(wants[here].start, reached[here].stop) - reached[here].start)
    after = max(0, reached[here].size - before - wants[here].size)
    return Halo(exchange, tuple(source.placements), size, results[here], before, after)


def with_halo(halo: Halo, local: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """Return this rank's rows with the fetched rows and the padding."""
    return pad_rows(halo.exchange.fetch(local), halo.dim, halo.before, halo.after, value)


def own_gradient(halo: Halo, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of this rank's rows."""
    rows = gradient.shape[halo.dim] - halo.before - halo.after
    return halo.exchange.give_back(gradient.narrow(halo.dim, halo.before, rows))
