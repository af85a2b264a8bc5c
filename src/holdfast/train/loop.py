"""The training loop (`Trainer`): restore, initial weights, step, evaluate, save, record metrics and events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.api import load
from holdfast.checkpointer import Checkpointer
from holdfast.core.errors import Mismatch
from holdfast.core.events import Event, log_event
from holdfast.ema import EMA
from holdfast.train.checkpoints import open_checkpointer
from holdfast.train.config import FILE, RunConfig, check_run
from holdfast.train.data.datasets import open_datasets
from holdfast.train.data.feed import Feed
from holdfast.train.data.samples import Position
from holdfast.train.evaluation import Evaluation
from holdfast.train.loss import LossSums, MicroBatch
from holdfast.train.metrics import Metrics
from holdfast.train.model_settings import ModelIdentity, check_same_model
from holdfast.train.models.decoder import TIES
from holdfast.train.models.dropout import sample_keys
from holdfast.train.optimizer_settings import keep_options, set_learning_rate
from holdfast.train.parallel.meshes import AXES
from holdfast.train.parallel.parallel_model import build
from holdfast.train.plot import plot_metrics
from holdfast.train.rng import DISTINCT, MeshPosition, PurposeStreams
from holdfast.train.schedule import learning_rate_share

METRICS, PICTURE = "metrics.jsonl", "curve.png"


@dataclass(frozen=True, slots=True)
class Progress:
    """The numbers of one step, for a progress display."""

    step: int
    steps: int
    loss: float
    lr: float
    gradient_norm: float
    tokens_per_s: float
    consumed_samples: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run: its last step, the step it resumed from (0: none), and whether a signal ended it."""

    step: int
    resumed_from: int
    preempted: bool


Watcher = Callable[[Progress], None]
Notice = Callable[[str, int, Mapping[str, Any]], None]  # name, step and values of an event, as in metrics.jsonl


class Trainer:
    """One rank's part of a run. Every rank creates one with the same config; the methods are collective."""

    def __init__(self, config: RunConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        train, layout = config.train, config.layout
        self.batches = check_run(config, dist.get_world_size() if dist.is_initialized() else 1)
        self.replica = build(
            config.model, layout, device, getattr(torch, train.dtype), train.seed, recompute=train.recompute
        )
        self.optimizer = self.replica.make_optimizer(torch.optim.AdamW, **config.optimizer.options())
        self.ema = None
        if config.ema.decay:
            self.ema = EMA(self.replica.module, config.ema.decay, every=config.ema.every, device=config.ema.device)
        dataset, evaluation = open_datasets(config.data, config.model.vocab_size)
        self._feed = Feed(dataset, self.replica, config.data.sequence)
        self._evaluation = None
        if evaluation is not None:
            feed = Feed(evaluation, self.replica, config.data.sequence)
            self._evaluation = Evaluation(self.replica, feed, self.batches, len(evaluation))
        self.position = Position(len(dataset), config.data.seed, dataset.name)
        meshes = self.replica.meshes
        position = MeshPosition(
            {axis: getattr(layout, axis) for axis in AXES}, {axis: meshes.at(axis) for axis in AXES}
        )
        self.streams = PurposeStreams(train.seed, position, device)
        self.folder = Path(train.folder)
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.metrics = Metrics(self.folder / METRICS if self.is_first else None)
        self.notice: Notice | None = None  # called on rank 0 for every event; of saves, on their thread

    def state(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as a state to save."""
        identity = ModelIdentity(self.config.model)
        state = {**self.replica.state(), "identity": identity, "data": self.position, "random": self.streams}
        return state if self.ema is None else {**state, "ema": self.ema}

    def run(self, watch: Watcher | None = None) -> RunResult:
        """Train to the last step, from the newest good checkpoint if there is one.

        A save that fails during training is reported and does not stop the run; a failed last save raises.
        """
        try:
            with self._checkpointer() as checkpointer:
                outcome = self._train(checkpointer, watch)
        finally:
            self.metrics.close()
        if self.is_first:
            plot_metrics(self.folder / METRICS, self.folder / PICTURE, f"loss: {self.config.layout}")
        return outcome

    def _train(self, checkpointer: Checkpointer, watch: Watcher | None) -> RunResult:
        steps, state = self.config.train.steps, self.state()
        with keep_options(self.optimizer):
            start = self._restore(checkpointer, state)
        if not start and self.config.train.start_from:
            self._load_weights(self.config.train.start_from)
        self._record_start(start)
        step = start
        handle = None
        for step in range(start + 1, steps + 1):
            progress = self.step(step)
            self._evaluate_if_due(step)
            numbers = {"loss": progress.loss}
            handle = checkpointer.save_if_due(step, state, metrics=numbers)
            if handle is None and self.config.checkpoint.at_end and step == steps:
                handle = checkpointer.save(step, state, metrics=numbers)
            if handle is not None:
                self._record_event("save", step, stall_ms=round(handle.stall_ms, 3))
            if watch is not None:
                watch(progress)
            if checkpointer.preempted:
                break
        if handle is not None:
            handle.result()
        return RunResult(step, start, checkpointer.preempted)

    def _restore(self, checkpointer: Checkpointer, state: dict[str, Any]) -> int:
        try:
            return checkpointer.restore(state) or 0
        except Mismatch as error:
            raise Mismatch(
                f"{error}\n{self.folder} holds a run that this config cannot resume: choose another train.folder. "
                "To load only the weights of a checkpoint, use train.start_from"
            ) from error

    def _load_weights(self, path: str) -> None:
        """Load initial weights from a checkpoint of any layout, format or dtype."""
        check_same_model(path, self.config.model)
        state: dict[str, Any] = {"model": self.replica.module}
        load(path, state, mapping=self.replica.load_mapping, ties=self._ties, mesh=self.replica.meshes.dense, cast=True)
        self._record_event("took weights", 0, path=path)

    def step(self, step: int) -> Progress:
        """Run one optimizer step on the next global batch."""
        began = time.perf_counter()
        optimizer, train = self.config.optimizer, self.config.train
        micro_batches = self._next_batch(step)
        with self.streams.use(DISTINCT):  # the trainer draws no random numbers here; a user's module may
            sums = self.replica.forward_backward(micro_batches)
        norm = self.replica.clip(optimizer.clip) if optimizer.clip else self.replica.gradient_norm()
        rate = optimizer.lr * learning_rate_share(self.config.schedule, step, train.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        self.position.advance(self.batches)
        self.streams.step = step
        return self._record_step(step, sums, norm, rate, time.perf_counter() - began)

    def _next_batch(self, step: int) -> list[MicroBatch]:
        rank = self.replica.meshes.dp_rank
        micro_batches = self._feed.micro_batches(self.position.shares(self.batches, rank))
        if not self.config.model.drops:
            return micro_batches
        first, count = self.position.first(self.batches, rank), self.batches.rank_batch
        keys = sample_keys(self.config.train.seed, step, first, count, self.replica.device)
        each = torch.split(keys, self.batches.micro_batch)
        return [replace(batch, keys=part) for batch, part in zip(micro_batches, each, strict=True)]

    def _record_step(self, step: int, sums: LossSums, norm: float, rate: float, seconds: float) -> Progress:
        consumed, per_s = self.position.consumed_samples, sums.tokens / seconds
        values = {"loss": sums.loss, "aux_loss": sums.aux_loss, "lr": rate, "gradient_norm": norm}
        values |= {"tokens_per_s": round(per_s, 1), "step_ms": round(seconds * 1000, 3)}
        self.metrics.step(step, **values, consumed_samples=consumed)
        return Progress(step, self.config.train.steps, sums.loss, rate, norm, per_s, consumed)

    def evaluate(self) -> LossSums | None:
        """Return the loss over the evaluation samples; None without evaluation samples."""
        return None if self._evaluation is None else self._evaluation.run()

    def _evaluate_if_due(self, step: int) -> None:
        every = self.config.train.evaluate_every
        if not every or (step % every and step != self.config.train.steps) or self._evaluation is None:
            return
        live = self.evaluate()
        assert live is not None
        averaged = None
        if self.ema is not None:
            with self.ema.swap():
                averaged = self.evaluate()
        extra = {} if averaged is None else {"ema_loss": averaged.loss}
        self._record_event("evaluated", step, loss=live.loss, tokens=live.tokens, **extra)

    @property
    def _ties(self) -> dict[str, str]:
        return TIES if self.config.model.tie_word_embeddings else {}

    def _checkpointer(self) -> Checkpointer:
        return open_checkpointer(
            self.config.checkpoint,
            self.folder,
            mapping=self.replica.mapping,
            ties=self._ties,
            mesh=self.replica.meshes.dense,
            listener=self._on_event,
        )

    def _record_event(self, name: str, step: int | None, **values: Any) -> None:
        self.metrics.event(name, step, **values)
        if self.notice is not None and self.is_first and step is not None:
            self.notice(name, step, values)

    def _on_event(self, event: Event) -> None:
        log_event(event)
        if event.name in ("published", "failed", "skipped"):
            self._record_event(event.name, event.step, seconds=round(event.seconds, 3), detail=event.detail)

    def _record_start(self, start: int) -> None:
        if self.is_first:  # only now: a run that fails to start must not overwrite an existing run's config
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / FILE).write_text(self.config.to_toml(), encoding="utf-8")
        layout = str(self.config.layout)
        if start:
            self._record_event("resumed", start, layout=layout, consumed_samples=self.position.consumed_samples)
        else:
            self._record_event("began", 0, layout=layout)
        if self.streams.derived:
            self._record_event("random streams derived anew", start, detail=self.streams.derived)
