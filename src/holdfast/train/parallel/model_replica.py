"""One rank's model in training: forward and backward, clipping, evaluation, its optimizer, the state to save."""

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
from holdfast.train.models.decoder import Decoder
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.clip import clip_gradients, gradient_norm
from holdfast.train.parallel.gradients import GradientSums, finish_gradients
from holdfast.train.parallel.meshes import Meshes
from holdfast.train.parallel.pipeline import Pipeline


class ModelReplica:
    """This rank's part of a model in training. Created by `parallel_model.build`; its methods are collective."""

    def __init__(
        self,
        config: ModelConfig,
        meshes: Meshes,
        module: Decoder,
        objective: Objective,
        pipeline: Pipeline | None,
        gradient_sums: GradientSums,
        device: torch.device,
    ) -> None:
        self.config = config
        self.meshes = meshes
        self.module = module
        self.device = device
        self.optimizer: torch.optim.Optimizer | None = None
        self._objective = objective
        self._pipeline = pipeline
        self._gradient_sums = gradient_sums

    @property
    def layout(self) -> Layout:
        return self.meshes.layout

    @property
    def pipeline(self) -> Pipeline | None:
        """This rank's stages of a pipeline; None without one."""
        return self._pipeline

    @property
    def mapping(self) -> Mapping | None:
        """The mapping from live to stored tensors, for `holdfast.save` and `Checkpointer`; None if names match."""
        return save_mapping(self.config)

    @property
    def load_mapping(self) -> Mapping | None:
        """The mapping from stored to live tensors, for `holdfast.load`."""
        return load_mapping(self.config)

    @property
    def needs_inputs(self) -> bool:
        """True if this rank has the first stage."""
        return self.meshes.at("pp") == 0

    @property
    def needs_labels(self) -> bool:
        """True if this rank has the last stage."""
        return self.meshes.at("pp") == self.layout.pp - 1

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def make_optimizer(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
        """Create an optimizer over this rank's parameters, with weight decay for matrices but not for vectors.

        The two groups are the same on every layout, so that any layout can load the state of another.
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
        """Return the state for `holdfast.save`, `load` and `Checkpointer`, to be used with `mapping`."""
        state: dict[str, Any] = {"model": self.module}
        return state if self.optimizer is None else {**state, "optimizer": self.optimizer}

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> LossSums:
        """Compute the gradients of the mean loss over all tokens of all ranks, replacing earlier gradients."""
        self.module.train()
        for parameter in self.module.parameters():
            parameter.grad = None
        self._check_keys(micro_batches)
        counts = self._begin(micro_batches)
        if self._pipeline is not None:
            self._pipeline.run(micro_batches, training=True)
        else:
            self._accumulate(micro_batches)
        self.finish_gradients()
        return self._sums(counts)

    def finish_gradients(self) -> None:
        """Reduce the gradients of this rank's samples to those of the global batch, once after the last backward.

        Gradients that FSDP has reduced already stay as they are; parameters without one get zeros.
        """
        finish_gradients(self.parameters(), self._gradient_sums)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> LossSums:
        """Compute only the losses, without dropout. Ranks must pass equally many micro batches of one shape."""
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
        """Return the gradient norm over all parameters of all ranks, each element counted once."""
        return gradient_norm(self.parameters(), self.layout.dp * self.layout.tp, self._gradient_sums.copies)

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to `max_norm`; returns the norm before clipping."""
        norm = self.gradient_norm()
        clip_gradients(self.parameters(), norm, max_norm)
        return norm

    def _check_keys(self, micro_batches: Sequence[MicroBatch]) -> None:
        if self.config.drops and any(batch.keys is None for batch in micro_batches):
            raise InvalidArgument(
                "the model has dropout but a micro batch has no keys, so dropout would have no effect: pass keys from "
                "models.dropout.sample_keys to each MicroBatch, or set the model's dropout to 0"
            )

    def _accumulate(self, micro_batches: Sequence[MicroBatch]) -> None:
        for number, batch in enumerate(micro_batches):
            if isinstance(self.module, FSDPModule):
                self.module.set_requires_gradient_sync(number == len(micro_batches) - 1)
            loss = self._objective(self.module(batch.input_ids, keys=batch.keys), batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Count the tokens and sequences of the global batch, before backward.

        The counts stay on the device: reading them would make the host wait for the copies of a save.
        """
        if not micro_batches:
            raise InvalidArgument("there are no micro batches")
        if not self.layout.takes(len(micro_batches)):
            raise InvalidArgument(f"the pipeline of layout {self.layout} cannot run {len(micro_batches)} micro batches")
        for batch in micro_batches:
            if batch.input_ids.shape[1] % self.layout.tp:
                length = batch.input_ids.shape[1]
                raise InvalidArgument(f"sequences of {length} tokens are not divisible by tp={self.layout.tp}")
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
        """True if this rank's losses are summed: on the last stage, for one rank of each tensor group."""
        return self.needs_labels and self.meshes.at("tp") == 0

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        if self.layout.world > 1:
            dist.all_reduce(values)
        return values
