"""The two passes of a step through a pipeline: the trainer's schedules, with the embeddings on the last stage.

The first pass runs forward and records the embeddings. The second one runs forward and backward: the last stage
multiplies the embeddings of a micro batch by their gradients, so that the backward of that sum is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.errors import error_from_record, error_record
from holdfast.train.data.broadcast import broadcast_batch
from holdfast.train.embedding.gradient_sync import StepSync
from holdfast.train.embedding.module_passes import most_of_ranks
from holdfast.train.embedding.replay import RandomState, replayed
from holdfast.train.embedding.replica_encoder import ReplicaEncoder, split_output, token_ids
from holdfast.train.layout import Layout
from holdfast.train.parallel.pipeline import LastStage

RUN = 8  # micro batches of one run of a schedule, for each rank of the pipeline: it holds the hidden states of all
_LENGTHS = 16  # lengths are rounded up to multiples: a schedule is built for each


class PipelinePasses:
    """The passes of one step: `forward` before the loss, `backward` after it."""

    def __init__(self, encoder: ReplicaEncoder, sync: StepSync) -> None:
        pipeline = encoder.replica.pipeline
        assert pipeline is not None
        self._pipeline = pipeline
        self._encoder = encoder
        self._sync = sync
        self._device = encoder.replica.device
        self._random: RandomState | None = None
        self._failures: list[Exception] = []  # of the last stage, until every stage can raise it

    def forward(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the embeddings of each micro batch on the last stage, and nothing on the others."""
        self._random = RandomState(self._device)
        embeddings: list[torch.Tensor] = []

        def record(output: Any, numbers: torch.Tensor) -> torch.Tensor:
            number = int(numbers[0])
            if number < len(inputs) and not self._failures:
                try:
                    embeddings.append(self._encoder.embed(split_output(output)[0], inputs[number]).detach())
                except Exception as error:  # noqa: BLE001  (the other stages are waiting for this run to end)
                    self._failures.append(error)
            return torch.zeros((), device=self._device)

        self._run(inputs, record, training=False)
        return embeddings

    def backward(self, inputs: Sequence[Any], gradients: Sequence[torch.Tensor]) -> None:
        """Encode again with the same random numbers, and carry the gradients of the embeddings to the weights."""
        assert self._random is not None

        def weigh(output: Any, numbers: torch.Tensor) -> torch.Tensor:
            number = int(numbers[0])
            hidden, sums = split_output(output)
            # Stages expect a gradient of everything they sent: of an idle micro batch, and of the sums of routers.
            unused = [part.sum() * 0 for part in (hidden, sums) if part is not None]
            if number >= len(inputs):
                return torch.stack([part.float() for part in unused]).sum()
            embedding = self._encoder.embed(hidden, inputs[number])
            weighted = (embedding * gradients[number].to(embedding.dtype)).sum()
            return weighted if sums is None else weighted + unused[1]

        with replayed(self._random), torch.enable_grad():
            self._run(inputs, weigh, training=True)

    def on_every_rank(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return on every stage what `compute` returns on the last one, or raise its error. Collective."""

        def computed() -> dict[str, Any]:
            if not self._failures:
                try:
                    return {"value": compute()}
                except Exception as error:  # noqa: BLE001  (the other stages must be notified of any failure)
                    self._failures.append(error)
            return {"error": error_record(self._failures[0])}

        group = self._pipeline.group
        found = broadcast_batch(computed, group, dist.get_global_rank(group, group.size() - 1), self._device)
        if "error" in found:
            raise self._failures[0] if self._failures else error_from_record(found["error"])
        value: torch.Tensor = found["value"]
        return value

    def _run(self, inputs: Sequence[Any], last_stage: LastStage, *, training: bool) -> None:
        """Run all micro batches, padded to one shape, and idle ones where a schedule or other ranks need more."""
        count = len(inputs)
        if self._sync.is_collective:
            count = most_of_ranks(count, self._sync.group, self._device)
        size = run_size(self._encoder.replica.layout, count)
        shapes = [token_ids(rows).shape for rows in inputs]
        rows, length = (max(sizes) for sizes in zip(*shapes, strict=True))
        length = -(-length // _LENGTHS) * _LENGTHS
        for begin in range(0, count, size):
            numbers = range(begin, begin + size)
            chosen = [inputs[number] if number < len(inputs) else inputs[0] for number in numbers]
            ids, options = zip(*(self._encoder.stage_inputs(part, rows, length) for part in chosen), strict=True)
            labels = [torch.full((rows,), number) for number in numbers]
            joined = {name: torch.cat([part[name] for part in options]) for name in options[0]}
            last = begin + size >= count
            self._pipeline.run_rows(ids, labels, last_stage, joined, training=training, reduce=last)


def run_size(layout: Layout, count: int) -> int:
    """Return the micro batches of each run of a schedule: equal runs, so few that memory does not grow with `count`."""
    runs = -(-count // (RUN * layout.pp))
    size = -(-count // runs)
    while not layout.takes(size):
        size += 1
    return size
