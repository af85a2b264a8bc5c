"""Pipeline parallelism with torch's schedules: stages of known shapes, schedules cached by shape."""

from __future__ import annotations

from collections.abc import Sequence
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
        self._schedules: dict[_Shape, Any] = {}

    def run(self, micro_batches: Sequence[MicroBatch], *, training: bool) -> None:
        """Run all micro batches forward, and backward when training; the objective records the losses."""
        shapes = {tuple(batch.input_ids.shape) for batch in micro_batches}
        if len(shapes) > 1:
            raise InvalidArgument(f"micro batches of a pipeline must have one shape, not {sorted(shapes)}")
        batch, length = shapes.pop()
        schedule = self._schedule(_Shape(len(micro_batches), batch, length, training))
        numbers = [number for number, _ in self._stages]
        inputs: tuple[torch.Tensor, ...] = ()
        target: torch.Tensor | None = None
        if 0 in numbers:
            inputs = (torch.cat([batch.input_ids for batch in micro_batches]),)
        if self._layout.stages - 1 in numbers:
            target = torch.cat([batch.labels for batch in micro_batches])
        keys = [batch.keys for batch in micro_batches if batch.keys is not None]
        drawn = {"keys": torch.cat(keys)} if training and keys else {}
        losses: list[torch.Tensor] | None = [] if target is not None else None
        if training:
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **drawn)
        else:
            with torch.no_grad():
                schedule.eval(*inputs, target=target, losses=losses)

    def _schedule(self, shape: _Shape) -> Any:
        if shape not in self._schedules:
            stages: list[Any] = [self._stage(number, module, shape) for number, module in self._stages]
            options: dict[str, Any] = {"loss_fn": self._objective, "scale_grads": False}
            if self._layout.schedule == "interleaved":
                made: Any = ScheduleInterleaved1F1B(stages, shape.micro_batches, **options)
            else:
                made = Schedule1F1B(stages[0], shape.micro_batches, **options)
            self._schedules[shape] = made
        return self._schedules[shape]

    def _stage(self, number: int, module: Decoder, shape: _Shape) -> PipelineStage:
        """Create a stage with known tensor shapes: shape inference by a trial run would consume random numbers."""
        last = self._layout.stages - 1
        return PipelineStage(
            module,
            number,
            self._layout.stages,
            self._device,
            input_args=self._flow(shape, "ids" if number == 0 else "hidden"),
            output_args=self._flow(shape, "logits" if number == last else "hidden"),
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
        flow = [torch.empty(size, dtype=dtype, device="meta", requires_grad=shape.training)]
        if config.traits.experts:
            sums = (shape.batch, 2, config.num_experts)
            flow.append(torch.empty(sums, dtype=torch.float32, device="meta", requires_grad=shape.training))
        return tuple(flow)
