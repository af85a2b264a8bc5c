"""The embeddings of a batch, in columns: this rank's rows, and the rows of all ranks, gathered with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Columns:
    """The embeddings of a batch as a loss takes them: queries, positives, and any number of columns of negatives.

    Row i of every column belongs to query i. A loss returns this rank's share of the loss of the whole batch: the
    shares of all ranks add up to it.
    """

    own: tuple[torch.Tensor, ...]  # this rank's rows, by column: [rows, dim]
    every: tuple[torch.Tensor, ...]  # the rows of all ranks, by column
    first: int = 0  # the number of this rank's first row among all
    group: dist.ProcessGroup | None = None

    @property
    def rows(self) -> int:
        return self.own[0].shape[0]

    @property
    def total(self) -> int:
        return self.every[0].shape[0]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor with a row for each row of the batch, of all ranks, without gradients."""
        return gather_rows(values.detach(), self.group)

    def require_numbers(self, name: str, values: torch.Tensor) -> None:
        """Raise InvalidArgument on every rank if a row of any rank has NaN or infinity. Collective."""
        bad = self.gather((~values.isfinite()).reshape(values.shape[0], -1).any(1).to(torch.int32)).nonzero()
        if len(bad):
            raise InvalidArgument(f"{name} has NaN or infinity in row {int(bad[0])} of the batch")


def gather_columns(own: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> Columns:
    """Gather the rows of all ranks of a group, which may hold different numbers of them. Collective."""
    rows = {column.shape[0] for column in own}
    if len(rows) != 1:
        raise InvalidArgument(f"the columns have {', '.join(map(str, sorted(rows)))} rows: give each as many")
    if group is None:
        return Columns(tuple(own), tuple(own))
    first = sum(_row_counts(own[0], group)[: group.rank()])
    return Columns(tuple(own), tuple(gather_rows(column, group) for column in own), first, group)


def gather_rows(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the rows of all ranks, in their order. The gradients of all ranks add up. Collective."""
    if group is None:
        return values
    out: torch.Tensor = _GatherRows.apply(values, _row_counts(values, group), group)  # type: ignore[no-untyped-call]
    return out


def _row_counts(values: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    counts = torch.zeros(group.size(), dtype=torch.int64, device=values.device)
    counts[group.rank()] = values.shape[0]
    dist.all_reduce(counts, group=group)
    return [int(count) for count in counts.tolist()]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        padded = values.new_zeros((max(counts), *values.shape[1:]))
        padded[: values.shape[0]] = values
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        first = sum(ctx.counts[: ctx.group.rank()])
        return summed[first : first + ctx.counts[ctx.group.rank()]], None, None
