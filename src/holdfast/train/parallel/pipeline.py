"""Pipeline parallelism with torch's schedules: stages of known shapes, schedules cached by shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from holdfast.core.errors import InvalidArgument
from holdfast.train.layout import Layout
from holdfast.train.loss import MicroBatch, Objective
from holdfast.train.models.decoder import Decoder
from holdfast.train.models.model_config import ModelConfig

_CACHED = 8  # schedules: each holds buffers for the hidden states of all its micro batches

LastStage = Callable[[Any, torch.Tensor], torch.Tensor]  # from the last stage's output and the labels to a loss


class _Stage(PipelineStage):
    """A stage whose FSDP gradients are reduced only after the last run of a step."""

    reduces = True

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.reduces:
            super().perform_reduce_grad(grad_scale_factor)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The shape a schedule is built for; torch's stages support one shape each."""

    micro_batches: int
    batch: int
    length: int
    training: bool


class Pipeline:
    """This rank's stages. Schedules are created at the first use of a shape and cached."""

    def __init__(
        self,
        layout: Layout,
        config: ModelConfig,
        stages: Sequence[tuple[int, Decoder]],
        group: dist.ProcessGroup,
        device: torch.device,
        objective: Objective,
    ) -> None:
        self._layout = layout
        self._config = config
        self._stages = stages
        self._group = group
        self._device = device
        self._objective = objective
        self._last_stage: LastStage = objective  # of the run in progress
        self._schedules: dict[_Shape, tuple[Any, list[_Stage]]] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group

    @property
    def is_last(self) -> bool:
        """True if this rank has the last stage."""
        return self._stages[-1][0] == self._layout.stages - 1

    def run(self, micro_batches: Sequence[MicroBatch], *, training: bool) -> None:
        """Run all micro batches forward, and backward when training; the objective records the losses."""
        shapes = {tuple(batch.input_ids.shape) for batch in micro_batches}
        if len(shapes) > 1:
            raise InvalidArgument(f"micro batches of a pipeline must have one shape, not {sorted(shapes)}")
        ids, labels = ([getattr(batch, name) for batch in micro_batches] for name in ("input_ids", "labels"))
        keys = [batch.keys for batch in micro_batches if batch.keys is not None]
        drawn = {"keys": torch.cat(keys)} if training and keys else {}
        self.run_rows(ids, labels, self._objective, drawn, training=training)

    def run_rows(
        self,
        ids: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        last_stage: LastStage,
        options: Mapping[str, torch.Tensor],
        *,
        training: bool,
        reduce: bool = True,
    ) -> None:
        """Run micro batches forward, and backward when training.

        Args:
            ids: Token ids of each micro batch, of one shape.
            labels: What the last stage is given of each micro batch beside its output, with as many rows.
            last_stage: Called on the last stage with the output and the labels of each micro batch, in their order;
                the sum of what it returns is differentiated.
            options: Keywords of every stage, with a row for each row of all micro batches.
            training: Run backward too.
            reduce: Reduce FSDP's gradients afterwards; False if another run of the same step follows.
        """
        batch, length = ids[0].shape
        schedule, stages = self._schedule(_Shape(len(ids), batch, length, training))
        for stage in stages:
            stage.reduces = reduce
        numbers = [number for number, _ in self._stages]
        inputs = (torch.cat(list(ids)),) if 0 in numbers else ()
        target = torch.cat(list(labels)) if self.is_last else None
        losses: list[torch.Tensor] | None = [] if target is not None else None
        self._last_stage = last_stage
        if training:
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **options)
            return
        with torch.no_grad():
            schedule.eval(*inputs, target=target, losses=losses, return_outputs=False, **options)
        for stage in stages:
            stage.clear_runtime_states()  # torch would keep all hidden states until the next run

    def _loss(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        return self._last_stage(output, labels)

    def _schedule(self, shape: _Shape) -> tuple[Any, list[_Stage]]:
        """Return the schedule of a shape, with its stages. The schedule that was used longest ago makes room."""
        if shape in self._schedules:
            self._schedules[shape] = self._schedules.pop(shape)
        else:
            if len(self._schedules) == _CACHED:
                del self._schedules[next(iter(self._schedules))]
            stages = [self._stage(number, module, shape) for number, module in self._stages]
            options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
            if self._layout.schedule == "interleaved":
                made: Any = ScheduleInterleaved1F1B(list(stages), shape.micro_batches, **options)
            else:
                made = Schedule1F1B(stages[0], shape.micro_batches, **options)
            self._schedules[shape] = (made, stages)
        return self._schedules[shape]

    def _stage(self, number: int, module: Decoder, shape: _Shape) -> _Stage:
        """Create a stage with known tensor shapes: shape inference by a trial run would consume random numbers."""
        output = "hidden" if number < self._layout.stages - 1 else "logits" if module.has_head else "normed"
        return _Stage(
            module,
            number,
            self._layout.stages,
            self._device,
            input_args=self._flow(shape, "ids" if number == 0 else "hidden"),
            output_args=self._flow(shape, output),
            group=self._group,
        )

    def _flow(self, shape: _Shape, what: str) -> tuple[torch.Tensor, ...]:
        """Return the inputs or outputs of a stage as meta tensors."""
        config, tp = self._config, self._layout.tp
        if what == "ids":
            return (torch.empty(shape.batch, shape.length, dtype=torch.int64, device="meta"),)
        dtype = self._stages[0][1].compute_dtype
        size = (shape.batch, shape.length // tp, config.hidden_size)
        if what == "logits":
            size = (shape.batch, shape.length, config.vocab_size // tp)
        if what == "normed":
            size = (shape.batch, shape.length, config.hidden_size)
        flow = [torch.empty(size, dtype=dtype, device="meta", requires_grad=shape.training)]
        if config.traits.experts:
            sums = (shape.batch, 2, config.num_experts)
            flow.append(torch.empty(sums, dtype=torch.float32, device="meta", requires_grad=shape.training))
        return tuple(flow)
