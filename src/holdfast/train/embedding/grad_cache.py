"""GradCache: the gradients of a loss over a whole batch, with the memory of one micro batch.

A contrastive loss compares every text with every other one of the batch, so its gradients cannot be accumulated over
micro batches. GradCache encodes the batch twice: without gradients, to compute the loss and its gradients with respect
to the embeddings; and again, one micro batch at a time, to carry those on to the weights. The second time draws the
random numbers of the first. (Gao et al., 2021: Scaling deep contrastive learning batch size under memory limited setup)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import gather_columns
from holdfast.train.embedding.gradient_sync import GradientSync, StepSync
from holdfast.train.embedding.micro_batches import DividedColumn, Division, row_count
from holdfast.train.embedding.module_passes import ModulePasses, device_of
from holdfast.train.embedding.pipeline_passes import PipelinePasses
from holdfast.train.embedding.replica_encoder import EncodedReplica, ReplicaEncoder
from holdfast.train.embedding.replica_sync import ReplicaSync
from holdfast.train.embedding.usable_batch import agreed


class GradCache:
    """Trains on batches that no device holds at once: `step` leaves the gradients of the whole batch in `.grad`.

    Args:
        encode: Returns the embeddings [rows, dim] of some rows of a column. If it is not the module itself, give that
            as `module`. A `ReplicaEncoder` encodes with the trainer's model, on any layout.
        loss: Called with `Columns` and the keywords of `step`; returns this rank's share of the loss. If it is a
            module, its parameters, such as a learned temperature, get gradients too.
        micro_batch: Rows that are encoded at once.
        micro_tokens: Tokens that are encoded at once, with padding, instead: short rows then make large parts.
        group: The ranks that share the batch, each with rows of its own; they may hold different numbers of them.
            DDP and FSDP2 modules send gradients once, with the last micro batch; those of a plain module are added up.
            A `ReplicaEncoder` has its own.
        trim: Cut the padding that follows the longest row of each micro batch.
        sort: Put rows of similar length into the same micro batch, so that little is padding. By default where dropout
            does not depend on it: for the trainer's model. Torch's dropout draws other numbers in another order.

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
        trim: bool = True,
        sort: bool | None = None,
    ) -> None:
        keyed = getattr(encode, "keyed_dropout", False)
        self._division = Division(micro_batch, micro_tokens, trim, keyed if sort is None else sort)
        if isinstance(encode, EncodedReplica):
            if group is not None or module is not None:
                raise InvalidArgument(
                    f"a {type(encode).__name__} has its own group and module: leave out group= and module="
                )
            if micro_tokens is not None and encode.replica.pipeline is not None:
                raise InvalidArgument("micro batches of a pipeline have one shape: use micro_batch, not micro_tokens")
            group, module = encode.group, encode.replica.module
        self._encode = encode
        self._loss = loss
        self._group = None if group is None or group.size() == 1 else group
        self._module = module if module is not None or not isinstance(encode, nn.Module) else encode

    def step(self, columns: Iterable[Any], *, scale: float | torch.Tensor = 1.0, **extras: Any) -> torch.Tensor:
        """Add the gradients of one batch to `.grad`, and return its loss, the same on every rank. Collective.

        Args:
            columns: Queries, positives and any columns of negatives, this rank's rows of each: tensors, dicts of
                tensors, or lists of whatever `encode` takes.
            scale: Multiplies the gradients, not the loss that is returned: a part of an accumulation, or
                `scaler.scale(torch.ones(()))` of a GradScaler.
            extras: Given to the loss: labels, a teacher's scores or embeddings, numbers of texts.
        """
        divided = self._divided(columns, training=True)
        inputs = _inputs(divided)
        sync, passes = self._passes(self._loss if isinstance(self._loss, nn.Module) else None)
        with sync.step():
            leaves = [embedding.requires_grad_() for embedding in passes.forward(inputs)]

            def compute() -> torch.Tensor:
                with torch.enable_grad():
                    share = _checked_share(self._share(divided, leaves, extras))
                    (share * scale).backward()  # type: ignore[no-untyped-call]
                return share.detach()

            share = passes.on_every_rank(compute)
            gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
            passes.backward(inputs, gradients)
        return share if self._group is None else _sum(share, self._group)

    @torch.no_grad()
    def evaluate(self, columns: Iterable[Any], **extras: Any) -> torch.Tensor:
        """Return the loss of a batch without gradients, the same on every rank. Collective."""
        divided = self._divided(columns, training=False)
        _, passes = self._passes(None)
        embeddings = passes.forward(_inputs(divided))
        share = passes.on_every_rank(lambda: self._share(divided, embeddings, extras).detach())
        return share if self._group is None else _sum(share, self._group)

    @torch.no_grad()
    def encode(self, column: Any) -> torch.Tensor:
        """Return the embeddings of one column without gradients, the same on all stages of a pipeline. Collective."""
        divided = self._divided([column], training=False)
        _, passes = self._passes(None)
        embeddings = passes.forward(_inputs(divided))
        return passes.on_every_rank(lambda: divided[0].join(embeddings))

    def _divided(self, given: Iterable[Any], *, training: bool) -> list[DividedColumn]:
        """Divide the columns into micro batches. Raises on every rank if those of any rank cannot be used."""
        columns = [given] if isinstance(given, Mapping) else list(given)

        def divide() -> list[DividedColumn]:
            if isinstance(given, Mapping):
                raise InvalidArgument(f"the columns are one input with {', '.join(given)}: give a list of inputs")
            if training and torch.is_inference_mode_enabled():
                raise InvalidArgument("a step has no gradients within torch.inference_mode: leave that out")
            counts = [row_count(column) for column in columns]
            if not counts or 0 in counts:
                raise InvalidArgument(f"column {counts.index(0)} has no rows" if counts else "a batch needs columns")
            if len(set(counts)) != 1:
                found = ", ".join(map(str, sorted(set(counts))))
                raise InvalidArgument(f"the columns have {found} rows: give each as many")
            if isinstance(self._encode, EncodedReplica):
                self._encode.check(columns, training=training)
            return [self._division.divide(column) for column in columns]

        return agreed(divide, len(columns), self._group, device_of(columns[:1], self._module))

    def _passes(self, loss: nn.Module | None) -> tuple[StepSync, ModulePasses | PipelinePasses]:
        if not isinstance(self._encode, EncodedReplica):
            sync: StepSync = GradientSync(self._module, loss, self._group)
            return sync, ModulePasses(self._encode, self._module, sync)
        sync = ReplicaSync(self._encode, loss)
        if isinstance(self._encode, ReplicaEncoder) and self._encode.replica.pipeline is not None:
            return sync, PipelinePasses(self._encode, sync)
        return sync, ModulePasses(self._encode, self._module, sync)

    def _share(
        self, divided: Sequence[DividedColumn], embeddings: Sequence[torch.Tensor], extras: dict[str, Any]
    ) -> torch.Tensor:
        """Return this rank's share of the loss."""
        found, own = iter(embeddings), []
        for column in divided:
            joined = column.join(list(itertools.islice(found, len(column.sizes))))
            own.append(joined if joined.dtype == torch.float64 else joined.float())
        with torch.autocast(own[0].device.type, enabled=False):  # embeddings are compared in fp32, as they come here
            return self._loss(gather_columns(own, self._group), **extras)


def _checked_share(share: Any) -> torch.Tensor:
    """Return what a loss returned, if it is one number that has gradients."""
    if not isinstance(share, torch.Tensor) or share.numel() != 1:
        found = f"a tensor {list(share.shape)}" if isinstance(share, torch.Tensor) else f"a {type(share).__name__}"
        raise InvalidArgument(f"the loss returned {found}; expected a tensor with one number, this rank's share")
    if not share.requires_grad:
        raise InvalidArgument(
            "the loss returned a tensor without gradients: compute it from the embeddings in `own` and `every` of "
            "Columns, neither detached nor as Python numbers"
        )
    return share.reshape(())


def _inputs(divided: Sequence[DividedColumn]) -> list[Any]:
    return [inputs for column in divided for inputs in column.inputs]


def _sum(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = share.detach().clone()
    dist.all_reduce(out, group=group)
    return out
