"""The loop that every run of the trainer shares: restore, step, evaluate, save, record metrics, events (`TrainingRun`).

A kind of training is a subclass: text in `loop`, embeddings in `embedding.trainer`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from holdfast.checkpointer import Checkpointer
from holdfast.core.errors import Mismatch
from holdfast.core.events import Event, log_event
from holdfast.ema import EMA
from holdfast.train.checkpoints import CheckpointConfig, open_checkpointer
from holdfast.train.config import FILE, EmaConfig, TrainConfig
from holdfast.train.layout import Layout
from holdfast.train.metrics import METRICS, Metrics
from holdfast.train.optimizer_settings import OptimizerConfig, keep_options, set_learning_rate
from holdfast.train.parallel.meshes import AXES
from holdfast.train.parallel.replica import Replica
from holdfast.train.plot import plot_metrics
from holdfast.train.rng import DISTINCT, MeshPosition, PurposeStreams
from holdfast.train.schedule import ScheduleConfig, learning_rate_share

PICTURE = "curve.png"


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


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The loss of one global batch, whose gradients are in place, its tokens, and other numbers for the metrics."""

    loss: float
    tokens: int
    more: Mapping[str, Any]


Watcher = Callable[[Progress], None]
Notice = Callable[[str, int, Mapping[str, Any]], None]  # name, step and values of an event, as in metrics.jsonl


class RunSettings(Protocol):
    """The sections that the configs of all kinds of training have."""

    @property
    def layout(self) -> Layout: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def schedule(self) -> ScheduleConfig: ...
    @property
    def train(self) -> TrainConfig: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...
    @property
    def ema(self) -> EmaConfig: ...
    def to_toml(self) -> str: ...


class DataPosition(Protocol):
    """A run's position in its data, saved with the run."""

    consumed_samples: int


class TrainingRun(ABC):
    """One rank's part of a run. Every rank creates one with the same config; the methods are collective.

    Args:
        config: The settings of the run.
        replica: This rank's part of the model.
        model: The module whose tensors are saved as the model.
        position: The position in the data.
    """

    def __init__(self, config: RunSettings, replica: Replica, model: nn.Module, position: DataPosition) -> None:
        self._settings = config
        self.replica = replica
        self._model = model
        self.position = position
        self.optimizer = replica.make_optimizer(torch.optim.AdamW, **config.optimizer.options())
        self.ema = None
        if config.ema.decay:
            self.ema = EMA(model, config.ema.decay, every=config.ema.every, device=config.ema.device)
        layout, meshes = config.layout, replica.meshes
        place = MeshPosition({axis: getattr(layout, axis) for axis in AXES}, {axis: meshes.at(axis) for axis in AXES})
        self.streams = PurposeStreams(config.train.seed, place, replica.device)
        self.folder = Path(config.train.folder)
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.metrics = Metrics(self.folder / METRICS if self.is_first else None)
        self.notice: Notice | None = None  # called on rank 0 for every event; of saves, on their thread

    # A kind of training.

    @abstractmethod
    def _gradients(self, step: int) -> BatchLoss:
        """Compute the gradients of the next global batch, replacing earlier ones."""

    @abstractmethod
    def _advance(self) -> None:
        """Move the position past the global batch just trained on."""

    @property
    @abstractmethod
    def _identity(self) -> Any:
        """The settings of the model, as an object of the state: a resumed run needs the same."""

    @abstractmethod
    def _load_weights(self, path: str) -> None:
        """Load initial weights from a checkpoint of any layout, format or dtype."""

    @abstractmethod
    def _measures(self) -> dict[str, Any] | None:
        """Return the measures on the evaluation data; None without such data."""

    def _files(self) -> Mapping[str, bytes] | None:
        """Return the files that are published with every step."""
        return None

    @property
    def _ties(self) -> dict[str, str]:
        return {}

    # What all kinds share.

    def state(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as a state to save."""
        state = {"model": self._model, "optimizer": self.optimizer, "identity": self._identity}
        state |= {"data": self.position, "random": self.streams}
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
            plot_metrics(self.folder / METRICS, self.folder / PICTURE, f"loss: {self._settings.layout}")
        return outcome

    def _train(self, checkpointer: Checkpointer, watch: Watcher | None) -> RunResult:
        steps, state, files = self._settings.train.steps, self.state(), self._files()
        with keep_options(self.optimizer):
            start = self._restore(checkpointer, state)
        if not start and self._settings.train.start_from:
            self._load_weights(self._settings.train.start_from)
            self._record_event("took weights", 0, path=self._settings.train.start_from)
        self._record_start(start)
        step = start
        handle = None
        for step in range(start + 1, steps + 1):
            progress = self.step(step)
            self._evaluate_if_due(step)
            numbers = {"loss": progress.loss}
            handle = checkpointer.save_if_due(step, state, metrics=numbers, files=files)
            if handle is None and self._settings.checkpoint.at_end and step == steps:
                handle = checkpointer.save(step, state, metrics=numbers, files=files)
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

    def step(self, step: int) -> Progress:
        """Run one optimizer step on the next global batch."""
        began = time.perf_counter()
        optimizer, train = self._settings.optimizer, self._settings.train
        with self.streams.use(DISTINCT):  # the trainer draws no random numbers here; a user's module may
            found = self._gradients(step)
        norm = self.replica.clip(optimizer.clip) if optimizer.clip else self.replica.gradient_norm()
        rate = optimizer.lr * learning_rate_share(self._settings.schedule, step, train.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        self._advance()
        self.streams.step = step
        return self._record_step(step, found, norm, rate, time.perf_counter() - began)

    def _record_step(self, step: int, found: BatchLoss, norm: float, rate: float, seconds: float) -> Progress:
        consumed, per_s = self.position.consumed_samples, found.tokens / seconds
        values = {"loss": found.loss, **found.more, "lr": rate, "gradient_norm": norm}
        values |= {"tokens_per_s": round(per_s, 1), "step_ms": round(seconds * 1000, 3)}
        self.metrics.step(step, **values, consumed_samples=consumed)
        return Progress(step, self._settings.train.steps, found.loss, rate, norm, per_s, consumed)

    def _evaluate_if_due(self, step: int) -> None:
        every = self._settings.train.evaluate_every
        if not every or (step % every and step != self._settings.train.steps):
            return
        live = self._measures()
        if live is None:
            return
        averaged: dict[str, Any] = {}
        if self.ema is not None:
            with self.ema.swap():
                averaged = self._measures() or {}
        extra = {f"ema_{name}": value for name, value in averaged.items() if name != "tokens"}
        self._record_event("evaluated", step, **live, **extra)

    def _checkpointer(self) -> Checkpointer:
        return open_checkpointer(
            self._settings.checkpoint,
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
            (self.folder / FILE).write_text(self._settings.to_toml(), encoding="utf-8")
        layout = str(self._settings.layout)
        if start:
            self._record_event("resumed", start, layout=layout, consumed_samples=self.position.consumed_samples)
        else:
            self._record_event("began", 0, layout=layout)
        if self.streams.derived:
            self._record_event("random streams derived anew", start, detail=self.streams.derived)
