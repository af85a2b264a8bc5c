"""Experts, stacked: all on one rank, or spread over the ranks of a group with tokens sent to them.

In memory a layer's experts are two tensors; on disk every expert has keys of its own, with
its number among all experts (see `stored.py`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from holdfast.train.collectives import exchange


class Experts(nn.Module):
    """Gated feed-forwards by number. `group` is set when they are spread over ranks, in rank order."""

    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.count = count
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))
        self.group: dist.ProcessGroup | None = None

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Every token through its chosen experts, weighted and summed: [tokens, hidden]."""
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // chosen.shape[1]]
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        done = self._local(rows, counts) if self.group is None else self._spread(rows, counts, self.group)
        done = done * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // chosen.shape[1], done)

    def _spread(self, rows: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
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
        done = self._local(rows[order], received.sum(0))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return exchange(done[back], receives, sends, group)

    def _local(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Rows sorted by local expert, each through its own; an expert without rows has a gradient of zeros."""
        gate_up, down = (_own(weight).to(rows.dtype) for weight in (self.gate_up_proj, self.down_proj))
        if rows.is_cuda and rows.dtype == torch.bfloat16:
            ends = counts.cumsum(0, dtype=torch.int32)  # stays on the device: nothing waits
            gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
            return torch._grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
        done = []
        for part, into, out in zip(torch.split(rows, counts.tolist()), gate_up.unbind(), down.unbind(), strict=True):
            gate, up = functional.linear(part, into).chunk(2, dim=-1)
            done.append(functional.linear(functional.silu(gate) * up, out))
        return torch.cat(done)


def _own(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
