"""The training of text (`Trainer`): its data, the loss of a global batch, evaluation, initial weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from holdfast.api import load
from holdfast.train.config import RunConfig, check_run
from holdfast.train.data.datasets import open_datasets
from holdfast.train.data.feed import Feed
from holdfast.train.data.samples import Position
from holdfast.train.evaluation import Evaluation
from holdfast.train.loss import LossSums, MicroBatch
from holdfast.train.model_settings import ModelIdentity, check_same_model
from holdfast.train.models.decoder import TIES
from holdfast.train.models.dropout import sample_keys
from holdfast.train.parallel.model_replica import ModelReplica
from holdfast.train.parallel.parallel_model import build
from holdfast.train.training_run import BatchLoss, Progress, RunResult, TrainingRun, Watcher

__all__ = ["Progress", "RunResult", "Trainer", "Watcher"]


class Trainer(TrainingRun):
    """One rank's part of a run. Every rank creates one with the same config; the methods are collective."""

    position: Position
    replica: ModelReplica

    def __init__(self, config: RunConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        train, layout = config.train, config.layout
        self.batches = check_run(config, dist.get_world_size() if dist.is_initialized() else 1)
        replica = build(
            config.model, layout, device, getattr(torch, train.dtype), train.seed, recompute=train.recompute
        )
        dataset, evaluation = open_datasets(config.data, config.model.vocab_size)
        self.position = Position(len(dataset), config.data.seed, dataset.name)
        super().__init__(config, replica, replica.module, self.position)
        self._feed = Feed(dataset, replica, config.data.sequence)
        self._evaluation = None
        if evaluation is not None:
            feed = Feed(evaluation, replica, config.data.sequence)
            self._evaluation = Evaluation(replica, feed, self.batches, len(evaluation))

    def _gradients(self, step: int) -> BatchLoss:
        sums = self.replica.forward_backward(self._next_batch(step))
        return BatchLoss(sums.loss, sums.tokens, {"aux_loss": sums.aux_loss})

    def _next_batch(self, step: int) -> list[MicroBatch]:
        rank = self.replica.meshes.dp_rank
        micro_batches = self._feed.micro_batches(self.position.shares(self.batches, rank))
        if not self.config.model.drops:
            return micro_batches
        first, count = self.position.first(self.batches, rank), self.batches.rank_batch
        keys = sample_keys(self.config.train.seed, step, first, count, self.replica.device)
        each = torch.split(keys, self.batches.micro_batch)
        return [replace(batch, keys=part) for batch, part in zip(micro_batches, each, strict=True)]

    def _advance(self) -> None:
        self.position.advance(self.batches)

    @property
    def _identity(self) -> ModelIdentity:
        return ModelIdentity(self.config.model)

    def _load_weights(self, path: str) -> None:
        """Load initial weights from a checkpoint of any layout, format or dtype."""
        check_same_model(path, self.config.model)
        state: dict[str, Any] = {"model": self.replica.module}
        load(path, state, mapping=self.replica.load_mapping, ties=self._ties, mesh=self.replica.meshes.dense, cast=True)

    def evaluate(self) -> LossSums | None:
        """Return the loss over the evaluation samples; None without evaluation samples."""
        return None if self._evaluation is None else self._evaluation.run()

    def _measures(self) -> dict[str, Any] | None:
        sums = self.evaluate()
        return None if sums is None else {"loss": sums.loss, "tokens": sums.tokens}

    @property
    def _ties(self) -> dict[str, str]:
        return TIES if self.config.model.tie_word_embeddings else {}
