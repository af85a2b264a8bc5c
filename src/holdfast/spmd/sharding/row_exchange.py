"""Contiguous rows that ranks along one mesh axis fetch from each other, and gradients sent back; padding of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from holdfast.spmd.base.torch_modes import own_coordinate
from holdfast.spmd.sharding.mesh_collectives import all_to_all_rows
from holdfast.spmd.sharding.shard_sizes import chunk_sizes


@dataclass(frozen=True, slots=True)
class Span:
    """Rows from `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)

    def within(self, other: Span) -> Span:
        """Return the intersection."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


def shard_spans(size: int, ranks: int) -> list[Span]:
    """Return the rows of each shard of a dim."""
    spans, start = [], 0
    for length in chunk_sizes(size, ranks):
        spans.append(Span(start, start + length))
        start += length
    return spans


@dataclass(frozen=True, slots=True)
class RowExchange:
    """The rows of a dim that each rank along one mesh axis has, and those that it wants."""

    mesh: DeviceMesh
    axis: int
    dim: int
    has: tuple[Span, ...]
    wants: tuple[Span, ...]

    @property
    def here(self) -> int:
        return own_coordinate(self.mesh)[self.axis]

    @property
    def is_needed(self) -> bool:
        """Return True if any rank wants rows that it lacks; the same answer on every rank."""
        return any(want.within(has).size < want.size for has, want in zip(self.has, self.wants, strict=True))

    def fetch(self, local: torch.Tensor) -> torch.Tensor:
        """Return the rows that this rank wants."""
        own, want = self.has[self.here], self.wants[self.here]
        outgoing = [self._rows(local, own, self._wanted_rows(own, other)) for other in range(len(self.has))]
        sources = [self._wanted_rows(has, self.here, place) for place, has in enumerate(self.has)]
        pieces = self._swap(outgoing, [span.size for span in sources], local)
        pieces[self.here] = self._rows(local, own, want.within(own))
        return torch.cat(pieces, self.dim)

    def give_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of this rank's rows, summed over every rank that fetched some."""
        own, want = self.has[self.here], self.wants[self.here]
        outgoing = [
            self._rows(gradient, want, self._wanted_rows(has, self.here, place)) for place, has in enumerate(self.has)
        ]
        sources = [self._wanted_rows(own, other) for other in range(len(self.has))]
        pieces = self._swap(outgoing, [span.size for span in sources], gradient)
        shape = list(gradient.shape)
        shape[self.dim] = own.size
        total = gradient.new_zeros(shape)
        kept = want.within(own)
        for piece, span in [*zip(pieces, sources, strict=True), (self._rows(gradient, want, kept), kept)]:
            if span.size:
                total.narrow(self.dim, span.start - own.start, span.size).add_(piece)
        return total

    def _wanted_rows(self, has: Span, asker: int, owner: int | None = None) -> Span:
        """Return the rows that `asker` wants of another rank; empty for its own."""
        owner = self.here if owner is None else owner
        return Span(0, 0) if asker == owner else self.wants[asker].within(has)

    def _rows(self, tensor: torch.Tensor, rows: Span, wanted: Span) -> torch.Tensor:
        start = wanted.start - rows.start if wanted.size else 0
        return tensor.narrow(self.dim, start, wanted.size)

    def _swap(self, outgoing: Sequence[torch.Tensor], sizes: Sequence[int], like: torch.Tensor) -> list[torch.Tensor]:
        """Send each rank its rows; return the rows that each rank sent."""
        if not self.is_needed:
            return [like.narrow(self.dim, 0, 0) for _ in outgoing]
        sent = torch.cat([piece.movedim(self.dim, 0) for piece in outgoing]).contiguous()
        counts = [piece.shape[self.dim] for piece in outgoing]
        received = all_to_all_rows(sent, sizes, counts, self.mesh, self.axis)
        return [piece.movedim(0, self.dim) for piece in torch.split(received, list(sizes))]


def pad_rows(tensor: torch.Tensor, dim: int, before: int, after: int, value: float) -> torch.Tensor:
    """Pad `tensor` along a dim with rows of one value."""
    if not before and not after:
        return tensor
    pieces = [tensor]
    for count, place in ((before, 0), (after, -1)):
        shape = list(tensor.shape)
        shape[dim] = count
        pieces.insert(place if place == 0 else len(pieces), tensor.new_full(shape, value))
    return torch.cat(pieces, dim)
