"""Differentiable collectives: a sum and a gather over ranks that compute one loss, and an all-to-all of rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _SumShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        out = x.detach().clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def sum_shared(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over a group whose ranks all compute the same loss from the result.

    That loss counts once, so the gradient of the sum is passed unchanged to each rank's input.
    """
    out: torch.Tensor = _SumShared.apply(x, group)  # type: ignore[no-untyped-call]
    return out


class _GatherShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


def gather_shared(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Concatenate equal parts along a dim over a group whose ranks all compute the same loss from the result.

    That loss counts once, so the gradient of each rank's part is the one that it computes itself.
    """
    out: torch.Tensor = _GatherShared.apply(x, group, dim)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Any:
        ctx.splits = (sends, receives, group)
        return _exchanged(x, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sends, receives, group = ctx.splits
        return _exchanged(gradients[0], receives, sends, group), None, None, None


def exchange(x: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Run an all-to-all: send `sends[r]` rows to rank r of the group, and receive `receives[r]` rows from it."""
    out: torch.Tensor = _Exchange.apply(x, sends, receives, group)  # type: ignore[no-untyped-call]
    return out


def _exchanged(x: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty((sum(receives), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)
    return out
