"""Rows of a sharded dim in any order (flip, roll, slices): each rank fetches its rows from their owners.

Which rank has which row is planned with numpy: in a trace of torch.compile a tensor has no values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.torch_autograd import in_gradient
from holdfast.spmd.base.torch_modes import own_coordinate
from holdfast.spmd.sharding.mesh_collectives import all_to_all_rows
from holdfast.spmd.sharding.shard_sizes import chunk_sizes

ZEROS = -1  # the source of a row of zeros

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowPermutation:
    """The source row of each row of the result; every rank knows all of them."""

    mesh: DeviceMesh
    axis: int
    dim: int
    size: int  # of the source along the dim
    source: Rows  # for each row of the result
    everywhere: bool = False  # every rank gets the full result instead of an even shard

    @property
    def ranks(self) -> int:
        return self.mesh.size(self.axis)

    @property
    def longest(self) -> int:
        """Return the rows of the longest shard of the source."""
        return chunk_sizes(self.size, self.ranks)[0]

    @property
    def received(self) -> int:
        """Return the rows that a rank receives at most; the same on every rank."""
        return max(self._count(want, rank) for rank, want in enumerate(self._wants()))

    def fetch(self, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the result."""
        here, wants = own_coordinate(self.mesh)[self.axis], self._wants()
        rows = local.movedim(self.dim, 0)
        own = wants[here]
        result = rows.new_zeros(len(own), *rows.shape[1:])
        kept = self._of(own, here)
        result[torch.tensor(kept)] = rows[torch.tensor(own[kept] - here * self.longest)]
        if self.received:
            outgoing = [want[self._of(want, here)] if rank != here else want[:0] for rank, want in enumerate(wants)]
            places = [self._of(own, rank) if rank != here else own[:0] for rank in range(self.ranks)]
            sent = rows[torch.tensor(np.concatenate(outgoing) - here * self.longest)]
            counts = [len(place) for place in places], [len(piece) for piece in outgoing]
            result[torch.tensor(np.concatenate(places))] = self._exchanged(sent, *counts)
        return result.movedim(0, self.dim)

    def _exchanged(self, sent: torch.Tensor, receives: list[int], gives: list[int]) -> torch.Tensor:
        """Exchange rows as bytes: not every backend sends every dtype."""
        row = sent.shape[1:]
        wire = sent.resolve_conj().reshape(len(sent), row.numel()).contiguous().view(torch.uint8)
        received = all_to_all_rows(wire, receives, gives, self.mesh, self.axis)
        return received.flatten().view(sent.dtype).reshape(sum(receives), *row)  # flat: a row may have no bytes

    def _wants(self) -> list[Rows]:
        if self.everywhere:
            return [self.source] * self.ranks
        return np.split(self.source, np.cumsum(chunk_sizes(len(self.source), self.ranks))[:-1])

    def _of(self, want: Rows, rank: int) -> Rows:
        """Return the positions in `want` of the rows that a rank has."""
        start = rank * self.longest
        return np.flatnonzero((want >= start) & (want < start + self.longest))

    def _count(self, want: Rows, rank: int) -> int:
        return len(want) - len(self._of(want, rank)) - int((want == ZEROS).sum())


def permuting_is_cheaper(order: RowPermutation, tensor: DTensor) -> bool:
    """Return True if fetching rows, forward and backward, moves fewer rows than gathering the dim."""
    twice = torch.is_grad_enabled() and tensor.requires_grad and not in_gradient()
    return order.received * (2 if twice else 1) <= order.longest * (order.ranks - 1)
