"""Experts, stacked: all on one rank, or spread over the ranks of a group with tokens sent to them.

In memory a layer's experts are two tensors; on disk every expert has keys of its own, with
its number among all experts (see `stored.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.nn import functional

from holdfast.train.collectives import exchange

if TYPE_CHECKING:
    from holdfast.spmd.auto.placing import UnitWay

Weights = tuple[torch.Tensor, torch.Tensor]


class Experts(nn.Module):
    """Gated feed-forwards by number. `group` is set when they are spread over ranks, in rank order."""

    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.count = count
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Every token through its chosen experts, weighted and summed: as `x`, whose last dim is the hidden one."""
        if isinstance(x, DTensor):
            return self._placed(x, chosen, weights)
        return self._routed(x, chosen, weights, self._own(), self.group)

    def _own(self) -> Weights:
        return _local_part(self.gate_up_proj), _local_part(self.down_proj)

    def _placed(self, x: DTensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """On DTensors: tokens go to the ranks that have the experts, or every rank serves all tokens with its own."""
        mesh, stacked = x.device_mesh, self.gate_up_proj
        assert isinstance(stacked, DTensor)
        axes = list(zip(x.placements, stacked.placements, strict=True))
        spread = [axis for axis, (_, of) in enumerate(axes) if of.is_shard()]
        partial = [Partial() if of.is_shard() and at.is_replicate() else at for at, of in axes]
        of_weights = [Partial() if at.is_shard() and of.is_replicate() else of for at, of in axes]
        local = [
            tensor.redistribute(placements=x.placements).to_local(grad_placements=partial)
            if isinstance(tensor, DTensor)
            else tensor
            for tensor in (x, chosen, weights)
        ]
        own = tuple(_local_part(weight, of_weights) for weight in (stacked, self.down_proj))
        group, first = None, None
        if spread and x.placements[spread[0]].is_shard():
            group = mesh.get_group(spread[0])
        elif spread:
            first = mesh.get_local_rank(spread[0]) * own[0].shape[0]
        out = self._routed(local[0], local[1], local[2], (own[0], own[1]), group, first)
        return DTensor.from_local(out, mesh, partial, run_check=False, shape=x.shape, stride=x.stride())

    def _routed(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        own: Weights,
        group: dist.ProcessGroup | None,
        first: int | None = None,
    ) -> torch.Tensor:
        """`first` is set where only the experts from that number on are here and others serve the rest."""
        tokens = x.flatten(0, -2)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        if first is not None:
            before, counts = counts[:first].sum(), counts[first : first + own[0].shape[0]]
            order = order[before : before + counts.sum()]
        sources = order // chosen.shape[-1]
        rows = tokens[sources]
        done = _through(rows, counts, own) if group is None else self._spread(rows, counts, own, group)
        done = done * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, sources, done).view_as(x)

    def _spread(self, rows: torch.Tensor, counts: torch.Tensor, own: Weights, group: dist.ProcessGroup) -> torch.Tensor:
        """Send rows, sorted by expert, to the ranks that have the experts, and get them back."""
        ranks = group.size()
        arriving = torch.empty_like(counts)  # [sender, local expert]
        dist.all_to_all_single(arriving, counts, group=group)
        sends = counts.view(ranks, -1).sum(1).tolist()
        received = arriving.view(ranks, -1)
        receives = received.sum(1).tolist()
        rows = exchange(rows, sends, receives, group)
        local = torch.arange(received.shape[1], device=rows.device).repeat(ranks)
        order = local.repeat_interleave(received.flatten()).argsort(stable=True)
        done = _through(rows[order], received.sum(0), own)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return exchange(done[back], receives, sends, group)

    def placement_ways(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> list[UnitWay]:
        """How a plan may place them along one axis: for `holdfast.spmd.plan`, which does not look inside."""
        from holdfast.spmd.auto.placing import PARTIAL, WHOLE, UnitWay  # the caller has loaded it

        whole, spread = ({"gate_up_proj": place, "down_proj": place} for place in (WHOLE, 0))
        ways = [UnitWay(whole, (WHOLE,) * 3, WHOLE), UnitWay(spread, (WHOLE,) * 3, PARTIAL)]
        for dim in range(x.ndim - 1):
            ways += [UnitWay(whole, (dim,) * 3, dim), UnitWay(spread, (dim,) * 3, dim, 4.0 * chosen.shape[-1])]
        return ways

    def rehearse(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The result without its values."""
        return torch.empty_like(x)

    def flops(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> int:
        """Of forward and backward."""
        return 6 * chosen.numel() * (self.gate_up_proj[0].numel() + self.down_proj[0].numel())


def _through(rows: torch.Tensor, counts: torch.Tensor, own: Weights) -> torch.Tensor:
    """Rows sorted by local expert, each through its own; an expert without rows has a gradient of zeros."""
    gate_up, down = (weight.to(rows.dtype) for weight in own)
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        ends = counts.cumsum(0, dtype=torch.int32)  # stays on the device: nothing waits
        gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    done = []
    for part, into, out in zip(torch.split(rows, counts.tolist()), gate_up.unbind(), down.unbind(), strict=True):
        gate, up = functional.linear(part, into).chunk(2, dim=-1)
        done.append(functional.linear(functional.silu(gate) * up, out))
    return torch.cat(done)


def _local_part(weight: torch.Tensor, gradients: Sequence[Placement] | None = None) -> torch.Tensor:
    return weight.to_local(grad_placements=gradients) if isinstance(weight, DTensor) else weight
