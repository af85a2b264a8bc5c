"""GradCache: the gradients of a loss over a whole batch, with the memory of one micro batch.

A contrastive loss compares every text with every other one of the batch, so its gradients cannot be accumulated over
micro batches. GradCache encodes the batch twice: without gradients, to compute the loss and its gradients with respect
to the embeddings; and again, one micro batch at a time, to carry those on to the weights. The second time draws the
random numbers of the first. (Gao et al., 2021: Scaling deep contrastive learning batch size under memory limited setup)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import gather_columns
from holdfast.train.embedding.gradient_sync import GradientSync, StepSync
from holdfast.train.embedding.micro_batches import row_count, row_ranges, take_rows
from holdfast.train.embedding.module_passes import ModulePasses
from holdfast.train.embedding.pipeline_passes import PipelinePasses
from holdfast.train.embedding.replica_encoder import ReplicaEncoder
from holdfast.train.embedding.replica_sync import ReplicaSync


class _Part(NamedTuple):
    """Some rows of a column."""

    column: int
    begin: int
    end: int


class GradCache:
    """Trains on batches that no device holds at once: `step` leaves the gradients of the whole batch in `.grad`.

    Args:
        encode: Returns the embeddings [rows, dim] of some rows of a column. If it is not the module itself, give that
            as `module`. A `ReplicaEncoder` encodes with the trainer's model, on any layout.
        loss: Called with `Columns` and the keywords of `step`; returns this rank's share of the loss. If it is a
            module, its parameters, such as a learned temperature, get gradients too.
        micro_batch: Rows that are encoded at once.
        micro_tokens: Tokens that are encoded at once, instead: rows of different lengths make parts of similar work.
        group: The ranks that share the batch, each with rows of its own; they may hold different numbers of them.
            DDP and FSDP2 modules send gradients once, with the last micro batch; those of a plain module are added up.
            A `ReplicaEncoder` has its own.
        trim: Cut the padding that follows the longest row of each micro batch. Torch's dropout then draws other
            numbers; that of the trainer's model does not.

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
        if isinstance(encode, ReplicaEncoder):
            if group is not None or module is not None:
                raise InvalidArgument("a ReplicaEncoder has its own group and module: leave out group= and module=")
            if micro_tokens is not None and encode.replica.pipeline is not None:
                raise InvalidArgument("micro batches of a pipeline have one shape: use micro_batch, not micro_tokens")
            group, module = encode.group, encode.replica.module
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
        parts, inputs = self._micro_batches(columns, training=True)
        sync, passes = self._passes(self._loss if isinstance(self._loss, nn.Module) else None)
        with sync.step():
            leaves = [embedding.requires_grad_() for embedding in passes.forward(inputs)]

            def compute() -> torch.Tensor:
                with torch.enable_grad():
                    share = self._share(parts, leaves, len(columns), extras)
                    (share * scale).backward()  # type: ignore[no-untyped-call]
                return share.detach()

            share = passes.on_every_rank(compute)
            gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
            passes.backward(inputs, gradients)
        return share if self._group is None else _sum(share, self._group)

    @torch.no_grad()
    def evaluate(self, columns: Sequence[Any], **extras: Any) -> torch.Tensor:
        """Return the loss of a batch without gradients, the same on every rank. Collective."""
        parts, inputs = self._micro_batches(columns, training=False)
        _, passes = self._passes(None)
        embeddings = passes.forward(inputs)
        share = passes.on_every_rank(lambda: self._share(parts, embeddings, len(columns), extras).detach())
        return share if self._group is None else _sum(share, self._group)

    @torch.no_grad()
    def encode(self, column: Any) -> torch.Tensor:
        """Return the embeddings of one column without gradients, the same on all stages of a pipeline. Collective."""
        _, inputs = self._micro_batches([column], training=False)
        _, passes = self._passes(None)
        embeddings = passes.forward(inputs)
        return passes.on_every_rank(lambda: torch.cat(embeddings))

    def _micro_batches(self, columns: Sequence[Any], *, training: bool) -> tuple[list[_Part], list[Any]]:
        """Divide the columns into parts; return those with their inputs."""
        missing = [number for number, column in enumerate(columns) if not row_count(column)]
        if missing or not columns:
            raise InvalidArgument(f"column {missing[0]} has no rows" if missing else "a batch needs columns")
        if isinstance(self._encode, ReplicaEncoder):
            self._encode.check(columns, training=training)
        parts = [
            _Part(number, begin, end)
            for number, column in enumerate(columns)
            for begin, end in row_ranges(column, self._micro_batch, self._micro_tokens)
        ]
        return parts, [take_rows(columns[part.column], part.begin, part.end, trim=self._trim) for part in parts]

    def _passes(self, loss: nn.Module | None) -> tuple[StepSync, ModulePasses | PipelinePasses]:
        if not isinstance(self._encode, ReplicaEncoder):
            sync: StepSync = GradientSync(self._module, loss, self._group)
            return sync, ModulePasses(self._encode, self._module, sync)
        sync = ReplicaSync(self._encode, loss)
        if self._encode.replica.pipeline is not None:
            return sync, PipelinePasses(self._encode, sync)
        return sync, ModulePasses(self._encode, self._module, sync)

    def _share(
        self, parts: Sequence[_Part], embeddings: Sequence[torch.Tensor], columns: int, extras: dict[str, Any]
    ) -> torch.Tensor:
        """Return this rank's share of the loss."""
        for part, embedding in zip(parts, embeddings, strict=True):
            if embedding.dim() != 2 or embedding.shape[0] != part.end - part.begin:
                found, rows = list(embedding.shape), part.end - part.begin
                raise InvalidArgument(f"encode returned {found} for {rows} rows; expected [rows, dim]")
        own = [
            torch.cat([found for part, found in zip(parts, embeddings, strict=True) if part.column == column])
            for column in range(columns)
        ]
        wide = [column if column.dtype == torch.float64 else column.float() for column in own]
        return self._loss(gather_columns(wide, self._group), **extras)


def _sum(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = share.detach().clone()
    dist.all_reduce(out, group=group)
    return out
