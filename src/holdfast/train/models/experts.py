"""Stacked experts: all on one rank, or sharded over a group that tokens are sent to; placements for spmd plans.

In memory a layer's experts are two tensors. On disk every expert has its own keys, with its global
number (see `checkpoint_mapping.py`).
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
    from holdfast.spmd.autoplan.units import UnitWay

Weights = tuple[torch.Tensor, torch.Tensor]


class Experts(nn.Module):
    """Gated feed-forwards by number. `group` is set if the experts are sharded over ranks, in rank order."""

    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.count = count
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's chosen experts, in the shape of `x`; its last dim is hidden."""
        if isinstance(x, DTensor):
            return self._forward_dtensor(x, chosen, weights)
        return self._route(x, chosen, weights, self._own(), self.group)

    def _own(self) -> Weights:
        return _local_part(self.gate_up_proj), _local_part(self.down_proj)

    def _forward_dtensor(self, x: DTensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Forward for DTensors: send tokens to the experts' ranks, or apply each rank's experts to all tokens."""
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
        out = self._route(local[0], local[1], local[2], (own[0], own[1]), group, first)
        return DTensor.from_local(out, mesh, partial, run_check=False, shape=x.shape, stride=x.stride())

    def _route(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        own: Weights,
        group: dist.ProcessGroup | None,
        first: int | None = None,
    ) -> torch.Tensor:
        """Apply the experts to local tokens; `first` is the number of the first local expert if all ranks see them."""
        tokens = x.flatten(0, -2)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        if first is not None:
            before, counts = counts[:first].sum(), counts[first : first + own[0].shape[0]]
            order = order[before : before + counts.sum()]
        sources = order // chosen.shape[-1]
        rows = tokens[sources]
        done = _apply_experts(rows, counts, own) if group is None else self._dispatch(rows, counts, own, group)
        done = done * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, sources, done).view_as(x)

    def _dispatch(
        self, rows: torch.Tensor, counts: torch.Tensor, own: Weights, group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Send rows, sorted by expert, to the ranks of the experts, and return the results."""
        ranks = group.size()
        arriving = torch.empty_like(counts)  # [sender, local expert]
        dist.all_to_all_single(arriving, counts, group=group)
        sends = counts.view(ranks, -1).sum(1).tolist()
        received = arriving.view(ranks, -1)
        receives = received.sum(1).tolist()
        rows = exchange(rows, sends, receives, group)
        local = torch.arange(received.shape[1], device=rows.device).repeat(ranks)
        order = local.repeat_interleave(received.flatten()).argsort(stable=True)
        done = _apply_experts(rows[order], received.sum(0), own)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return exchange(done[back], receives, sends, group)

    def placement_ways(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> list[UnitWay]:
        """Return the placements a plan may use along one axis, for `holdfast.spmd.plan`, which does not trace this."""
        from holdfast.spmd.autoplan.units import PARTIAL, WHOLE, UnitWay  # the caller has loaded it

        whole, spread = ({"gate_up_proj": place, "down_proj": place} for place in (WHOLE, 0))
        ways = [UnitWay(whole, (WHOLE,) * 3, WHOLE), UnitWay(spread, (WHOLE,) * 3, PARTIAL)]
        for dim in range(x.ndim - 1):
            ways += [UnitWay(whole, (dim,) * 3, dim), UnitWay(spread, (dim,) * 3, dim, 4.0 * chosen.shape[-1])]
        return ways

    def rehearse(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized result."""
        return torch.empty_like(x)

    def flops(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> int:
        """Return the floating-point operations of forward and backward."""
        return 6 * chosen.numel() * (self.gate_up_proj[0].numel() + self.down_proj[0].numel())


def _apply_experts(rows: torch.Tensor, counts: torch.Tensor, own: Weights) -> torch.Tensor:
    """Apply local experts to rows sorted by expert; an expert without rows gets a zero gradient."""
    gate_up, down = (weight.to(rows.dtype) for weight in own)
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        ends = counts.cumsum(0, dtype=torch.int32)  # stays on the device, without a sync
        gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    done = []
    for part, into, out in zip(torch.split(rows, counts.tolist()), gate_up.unbind(), down.unbind(), strict=True):
        gate, up = functional.linear(part, into).chunk(2, dim=-1)
        done.append(functional.linear(functional.silu(gate) * up, out))
    return torch.cat(done)


def _local_part(weight: torch.Tensor, gradients: Sequence[Placement] | None = None) -> torch.Tensor:
    return weight.to_local(grad_placements=gradients) if isinstance(weight, DTensor) else weight
