"""One rank's decoder in training: forward and backward, evaluation, the state to save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.program import Mapping
from holdfast.train.checkpoint_mapping import load_mapping, save_mapping
from holdfast.train.loss import IGNORED, LossSums, MicroBatch, Objective, counted_sequences
from holdfast.train.models.decoder import Decoder
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.gradients import GradientSums
from holdfast.train.parallel.meshes import Meshes
from holdfast.train.parallel.pipeline import Pipeline
from holdfast.train.parallel.replica import Replica


class ModelReplica(Replica):
    """This rank's part of a decoder in training. Created by `parallel_model.build`; its methods are collective."""

    module: Decoder

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
        super().__init__(meshes, module, gradient_sums, device)
        self.config = config
        self._objective = objective
        self._pipeline = pipeline

    @property
    def has_experts(self) -> bool:
        return self.config.traits.experts

    @property
    def pipeline(self) -> Pipeline | None:
        return self._pipeline

    @property
    def mapping(self) -> Mapping | None:
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
