"""What the training loop drives: one batch forward and backward, clipping, evaluation, the state to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.program import Mapping
from holdfast.train.checkpoint_mapping import load_mapping, save_mapping
from holdfast.train.layout import Layout
from holdfast.train.loss import IGNORED, LossSums, MicroBatch, Objective, counted_sequences
from holdfast.train.models.config import ModelConfig
from holdfast.train.models.decoder import Decoder
from holdfast.train.parallel.clip import clip_gradients, gradient_norm
from holdfast.train.parallel.gradients import Summing, finish_gradients
from holdfast.train.parallel.meshes import Meshes
from holdfast.train.parallel.pipeline import Pipeline


class Trainee:
    """This rank's part of a model under training. Made by `parallel.build`; its methods are collective."""

    def __init__(
        self,
        config: ModelConfig,
        meshes: Meshes,
        module: Decoder,
        objective: Objective,
        pipeline: Pipeline | None,
        summing: Summing,
        device: torch.device,
    ) -> None:
        self.config = config
        self.meshes = meshes
        self.module = module
        self.device = device
        self.optimizer: torch.optim.Optimizer | None = None
        self._objective = objective
        self._pipeline = pipeline
        self._summing = summing

    @property
    def layout(self) -> Layout:
        return self.meshes.layout

    @property
    def mapping(self) -> Mapping | None:
        """From live to stored tensors, for `holdfast.save` and `Checkpointer`; None where names are the same."""
        return save_mapping(self.config)

    @property
    def load_mapping(self) -> Mapping | None:
        """From stored to live tensors, for `holdfast.load`."""
        return load_mapping(self.config)

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank has the first stage."""
        return self.meshes.at("pp") == 0

    @property
    def needs_labels(self) -> bool:
        """Whether this rank has the last stage."""
        return self.meshes.at("pp") == self.layout.pp - 1

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def make_optimizer(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
        """An optimizer over this rank's parameters: matrices are decayed, vectors are not.

        The two groups are the same on every layout, so that one layout loads another's state.
        """
        every = list(self.module.parameters())
        matrices = [p for p in every if p.ndim > 1]
        vectors = [p for p in every if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        if self.layout.zero1 and (group := self.meshes.group("dp_replicate")) is not None:
            made: Any = ZeroRedundancyOptimizer(groups, kind, process_group=group, **options)
        else:
            made = kind(groups, **options)
        self.optimizer = made
        return made

    def state(self) -> dict[str, Any]:
        """The state to hand to `holdfast.save`, `load` and `Checkpointer`, with `mapping` beside it."""
        state: dict[str, Any] = {"model": self.module}
        return state if self.optimizer is None else {**state, "optimizer": self.optimizer}

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSums:
        """Gradients of the mean loss over all tokens of all ranks' micro batches; earlier ones are dropped."""
        self.module.train()
        for parameter in self.module.parameters():
            parameter.grad = None
        self._check_keys(micro_batches)
        counts = self._begin(micro_batches)
        if self._pipeline is not None:
            self._pipeline.run(micro_batches, training=True)
        else:
            self._accumulate(micro_batches)
        finish_gradients(self.parameters(), self._summing)
        return self._sums(counts)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> LossSums:
        """The losses alone, without dropout. Ranks must bring equally many micro batches, of one shape."""
        self.module.eval()
        counts = self._begin(micro_batches)
        if self._pipeline is not None:
            self._pipeline.run(micro_batches, training=False)
        else:
            with torch.no_grad():
                for batch in micro_batches:
                    self._objective(self.module(batch.input_ids), batch.labels)
        self.module.train()
        return self._sums(counts)

    def gradient_norm(self) -> float:
        """The norm over all parameters of all ranks, each element once."""
        return gradient_norm(self.parameters(), self.layout.dp * self.layout.tp, self._summing.copies)

    def clip(self, max_norm: float) -> float:
        """Shrink the gradients to `max_norm`; returns the norm that they had."""
        norm = self.gradient_norm()
        clip_gradients(self.parameters(), norm, max_norm)
        return norm

    def _check_keys(self, micro_batches: Sequence[MicroBatch]) -> None:
        if self.config.drops and any(batch.keys is None for batch in micro_batches):
            raise InvalidArgument(
                "the model has dropout and a micro batch has no keys, so that nothing would be dropped: give each "
                "MicroBatch its keys, of models.dropout.sample_keys, or set the model's dropout to 0"
            )

    def _accumulate(self, micro_batches: Sequence[MicroBatch]) -> None:
        for number, batch in enumerate(micro_batches):
            if isinstance(self.module, FSDPModule):
                self.module.set_requires_gradient_sync(number == len(micro_batches) - 1)
            loss = self._objective(self.module(batch.input_ids, keys=batch.keys), batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Tokens and sequences of the global batch, before any gradient is taken.

        They stay on the device: the host would wait for them behind a save's copies.
        """
        if not micro_batches:
            raise InvalidArgument("there are no micro batches")
        if not self.layout.takes(len(micro_batches)):
            raise InvalidArgument(f"the pipeline of layout {self.layout} takes no {len(micro_batches)} micro batches")
        for batch in micro_batches:
            if batch.input_ids.shape[1] % self.layout.tp:
                raise InvalidArgument(f"sequences of {batch.input_ids.shape[1]} do not divide by tp={self.layout.tp}")
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        if self._counts:
            counts[0] = torch.stack([(batch.labels != IGNORED).sum() for batch in micro_batches]).sum()
            counts[1] = torch.stack([counted_sequences(batch.labels).sum() for batch in micro_batches]).sum()
        self._objective.begin(*self._summed(counts))
        return counts

    def _sums(self, counts: torch.Tensor) -> LossSums:
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self._counts:
            sums += self._objective.sums()
        loss, aux, tokens, sequences = torch.cat((self._summed(sums), counts.double())).tolist()
        return LossSums(loss, int(tokens), aux, int(sequences), self.config.router_aux_loss_coef)

    @property
    def _counts(self) -> bool:
        """Whether this rank's losses count: on the last stage, one of each tensor group."""
        return self.needs_labels and self.meshes.at("tp") == 0

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        if self.layout.world > 1:
            dist.all_reduce(values)
        return values
