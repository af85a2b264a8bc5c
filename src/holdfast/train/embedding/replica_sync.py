"""The gradients of a `Replica` over its layout: as the trainer finishes them, once per step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from holdfast.train.embedding.gradient_sync import added_gradients, sum_over_ranks, trained_parameters
from holdfast.train.embedding.replica_encoder import EncodedReplica


class ReplicaSync:
    """Gradients add up: the trainer's FSDP2 does not average, and `finish_gradients` sums what FSDP2 does not."""

    factor = 1

    def __init__(self, encoder: EncodedReplica, loss: nn.Module | None) -> None:
        self._replica = encoder.replica
        self.group = encoder.group
        self._loss = trained_parameters([loss])

    @property
    def is_collective(self) -> bool:
        """True with FSDP2, which gathers weights, and with experts, which are sent tokens."""
        return self.group is not None and (self._replica.layout.dp_shard > 1 or self._replica.has_experts)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """FSDP2 reduces gradients with the last micro batch only."""
        if isinstance(self._replica.module, FSDPModule):
            self._replica.module.set_requires_gradient_sync(last)
        yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Finish the gradients of the model, and of the loss, which the last stage alone computes."""
        with added_gradients([*trained_parameters([self._replica.module]), *self._loss]):
            yield
            self._replica.finish_gradients()
            pipeline = self._replica.pipeline
            for group in (self.group, None if pipeline is None else pipeline.group):
                if group is not None:
                    sum_over_ranks(group, self._loss)
