"""GradCache: the gradients of a loss over a whole batch, with the memory of one micro batch.

A contrastive loss compares every text with every other one of the batch, so its gradients cannot be accumulated over
micro batches. GradCache encodes the batch twice: without gradients, to compute the loss and its gradients with respect
to the embeddings; and again, one micro batch at a time, to carry those on to the weights. The second time draws the
random numbers of the first. (Gao et al., 2021: Scaling deep contrastive learning batch size under memory limited setup)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import gather_columns
from holdfast.train.embedding.gradient_sync import GradientSync
from holdfast.train.embedding.micro_batches import row_count, row_ranges, take_rows
from holdfast.train.embedding.replay import RandomState, replayed


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a column, and the random state before they were encoded."""

    column: int
    begin: int
    end: int
    random: RandomState


class GradCache:
    """Trains on batches that no device holds at once: `step` leaves the gradients of the whole batch in `.grad`.

    Args:
        encode: Returns the embeddings [rows, dim] of some rows of a column. If it is not the module itself, give that
            as `module`.
        loss: Called with `Columns` and the keywords of `step`; returns this rank's share of the loss. If it is a
            module, its parameters, such as a learned temperature, get gradients too.
        micro_batch: Rows that are encoded at once.
        micro_tokens: Tokens that are encoded at once, instead: rows of different lengths make parts of similar work.
        group: The ranks that share the batch, each with rows of its own; they may hold different numbers of them.
            DDP and FSDP2 modules send gradients once, with the last micro batch; those of a plain module are added up.
        trim: Cut the padding that follows the longest row of each micro batch. Dropout then draws other numbers.

    Gradients are those of the loss of the whole batch, whatever the number of ranks and micro batches.
    """

    def __init__(
        self,
        encode: Callable[[Any], torch.Tensor],
        loss: Callable[..., torch.Tensor],
        *,
        micro_batch: int = 32,
        micro_tokens: int | None = None,
        group: dist.ProcessGroup | None = None,
        module: nn.Module | None = None,
        trim: bool = False,
    ) -> None:
        for name, value in (("micro_batch", micro_batch), ("micro_tokens", micro_tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidArgument(f"{name}={value!r} must be an integer of at least 1")
        self._encode = encode
        self._loss = loss
        self._micro_batch, self._micro_tokens, self._trim = micro_batch, micro_tokens, trim
        self._group = None if group is None or group.size() == 1 else group
        self._module = module if module is not None or not isinstance(encode, nn.Module) else encode

    def step(self, columns: Sequence[Any], *, scale: float = 1.0, **extras: Any) -> torch.Tensor:
        """Add the gradients of one batch to `.grad`, and return its loss, the same on every rank. Collective.

        Args:
            columns: Queries, positives and any columns of negatives, this rank's rows of each: tensors, dicts of
                tensors, or lists of whatever `encode` takes.
            scale: Multiplies the gradients, not the loss that is returned: a part of an accumulation, or the scale
                of a GradScaler.
            extras: Given to the loss: labels, a teacher's scores or embeddings, numbers of texts.
        """
        own_loss = self._loss if isinstance(self._loss, nn.Module) else None
        sync = GradientSync(self._module, own_loss, self._group)
        with sync.step():
            parts, embeddings = self._encoded(columns, sync)
            share, gradients = self._loss_gradients(parts, embeddings, len(columns), scale, extras)
            self._replay(columns, parts, gradients, sync)
        return share if self._group is None else _sum(share, self._group)

    @torch.no_grad()
    def evaluate(self, columns: Sequence[Any], **extras: Any) -> torch.Tensor:
        """Return the loss of a batch without gradients, the same on every rank. Collective."""
        sync = GradientSync(self._module, None, self._group)
        parts, embeddings = self._encoded(columns, sync)
        share = self._share(parts, embeddings, len(columns), extras).detach()
        return share if self._group is None else _sum(share, self._group)

    def _encoded(self, columns: Sequence[Any], sync: GradientSync) -> tuple[list[_Part], list[torch.Tensor]]:
        """Encode all rows without gradients, as many micro batches as every other rank of the group."""
        ranges = [
            (number, begin, end)
            for number, column in enumerate(columns)
            for begin, end in row_ranges(column, self._micro_batch, self._micro_tokens)
        ]
        missing = [number for number, column in enumerate(columns) if not row_count(column)]
        if missing or not columns:
            raise InvalidArgument(f"column {missing[0]} has no rows" if missing else "a batch needs columns")
        parts: list[_Part] = []
        embeddings: list[torch.Tensor] = []
        with torch.no_grad():
            for number, begin, end in ranges:
                device = _device_of(columns[number], self._module)
                part = _Part(number, begin, end, RandomState(device))
                embedding = self._encode(self._rows(columns, part))
                if embedding.dim() != 2 or embedding.shape[0] != end - begin:
                    shape = list(embedding.shape)
                    raise InvalidArgument(f"encode returned {shape} for {end - begin} rows; expected [rows, dim]")
                parts.append(part)
                embeddings.append(embedding.detach())
            for part in self._idle(parts, sync):
                with replayed(part.random):
                    self._encode(self._rows(columns, part))
        return parts, embeddings

    def _idle(self, parts: Sequence[_Part], sync: GradientSync) -> list[_Part]:
        """Return micro batches to run for nothing: where forward communicates, all ranks run as many."""
        if self._group is None or not sync.is_wrapped:
            return []
        most = torch.tensor([len(parts)], device=parts[0].random.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return [parts[0]] * (int(most) - len(parts))

    def _share(
        self, parts: Sequence[_Part], embeddings: Sequence[torch.Tensor], columns: int, extras: dict[str, Any]
    ) -> torch.Tensor:
        own = [
            torch.cat([found for part, found in zip(parts, embeddings, strict=True) if part.column == column])
            for column in range(columns)
        ]
        wide = [column if column.dtype == torch.float64 else column.float() for column in own]
        return self._loss(gather_columns(wide, self._group), **extras)

    def _loss_gradients(
        self,
        parts: Sequence[_Part],
        embeddings: Sequence[torch.Tensor],
        columns: int,
        scale: float,
        extras: dict[str, Any],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [embedding.requires_grad_() for embedding in embeddings]
        with torch.enable_grad():
            share = self._share(parts, leaves, columns, extras)
            (share * scale).backward()  # type: ignore[no-untyped-call]
        gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
        return share.detach(), gradients

    def _replay(
        self, columns: Sequence[Any], parts: Sequence[_Part], gradients: Sequence[torch.Tensor], sync: GradientSync
    ) -> None:
        idle = self._idle(parts, sync)
        todo = [(part, torch.zeros_like(gradients[0])) for part in idle]
        todo += [(part, gradient * sync.factor) for part, gradient in zip(parts, gradients, strict=True)]
        for number, (part, gradient) in enumerate(todo):
            with sync.micro_batch(last=number == len(todo) - 1), torch.enable_grad():
                with replayed(part.random):
                    embedding = self._encode(self._rows(columns, part))
                embedding.backward(gradient.to(embedding.dtype))  # type: ignore[no-untyped-call]

    def _rows(self, columns: Sequence[Any], part: _Part) -> Any:
        return take_rows(columns[part.column], part.begin, part.end, trim=self._trim)


def _device_of(column: Any, module: nn.Module | None) -> torch.device:
    values = column.values() if isinstance(column, Mapping) else [column]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    tensors += [] if module is None else module.parameters()
    found = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    return next(iter(found), torch.device("cpu"))


def _sum(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = share.detach().clone()
    dist.all_reduce(out, group=group)
    return out
