"""`RunConfig`, with the [train] and [ema] sections: read from a TOML file, batch sizes planned for the layout."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.train.batch import BatchSizes, derive_batches
from holdfast.train.checkpoints import CheckpointConfig
from holdfast.train.data.datasets import DataConfig
from holdfast.train.layout import Layout
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.optimizer_settings import OptimizerConfig
from holdfast.train.schedule import ScheduleConfig
from holdfast.train.settings import apply_sets, build, read_toml, write_toml

FILE = "config.toml"
_DTYPES = ("float32", "bfloat16")
_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The training loop: its length, batch sizes, seed and run folder.

    One of `global_batch`, `micro_batch` and `accumulation` may be omitted; the layout determines the
    data-parallel size. `dtype` is the compute dtype of the layers; parameters are always fp32.
    `start_from` is a checkpoint or Hugging Face folder with initial weights for a new run.
    """

    folder: str = "runs/holdfast"
    start_from: str = ""
    steps: int = 100
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    recompute: bool = False
    evaluate_every: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise InvalidArgument(f"train.dtype={self.dtype!r}: choose one of {', '.join(_DTYPES)}")
        if self.device not in _DEVICES:
            raise InvalidArgument(f"train.device={self.device!r}: choose one of {', '.join(_DEVICES)}")
        if self.steps < 1 or self.evaluate_every < 0 or self.seed < 0:
            raise InvalidArgument("train.steps must be at least 1; train.evaluate_every and train.seed at least 0")


@dataclass(frozen=True, slots=True)
class EmaConfig:
    """A moving average of the weights; `decay` 0 disables it. See holdfast.EMA."""

    decay: float = 0.0
    every: int = 1
    device: str = "same"

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise InvalidArgument(f"ema.decay={self.decay!r} must be at least 0 (no average) and less than 1")
        if self.every < 1:
            raise InvalidArgument(f"ema.every={self.every} must be at least 1, the number of steps per update")
        if self.device not in ("same", "cpu"):
            raise InvalidArgument(f"ema.device={self.device!r}: choose same or cpu")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The whole config of a run; only the model section is required."""

    model: ModelConfig
    layout: Layout = field(default_factory=Layout)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)

    def to_toml(self) -> str:
        """Return the whole config as TOML, including defaults."""
        return write_toml(dataclasses.asdict(self))


def parse_config(text: str, sets: Iterable[str] = (), where: str = "the config") -> RunConfig:
    """Parse a config from TOML text, strictly; "section.key=value" assignments in `sets` override it."""
    return build(RunConfig, apply_sets(read_toml(text, where), sets), "")


def read_config(path: str | Path, sets: Iterable[str] = ()) -> RunConfig:
    """Read a config from a TOML file; raises NotFound, or InvalidArgument with a suggestion."""
    return build(RunConfig, read_tables(path, sets), "")


def read_tables(path: str | Path, sets: Iterable[str] = ()) -> dict[str, Any]:
    """Read the tables of a TOML file, with "section.key=value" assignments applied; raises NotFound."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"{path}: cannot read the config: {error}") from None
    return apply_sets(read_toml(text, str(path)), sets)


def plan_batches(config: RunConfig) -> BatchSizes:
    """Return the batch sizes of a run on its layout; the default is one sequence per forward pass.

    A pipeline needs one micro batch per stage, or equal rounds of micro batches if it is interleaved;
    raises InvalidArgument otherwise.
    """
    train, layout = config.train, config.layout
    micro_batch, accumulation = train.micro_batch, train.accumulation
    if micro_batch is None and (train.global_batch is None or accumulation is None):
        micro_batch = 1
    if accumulation is None and train.global_batch is None:
        accumulation = layout.stages
    batches = derive_batches(
        global_batch=train.global_batch, micro_batch=micro_batch, accumulation=accumulation, data_parallel=layout.dp
    )
    if layout.schedule == "1f1b" and not layout.takes(batches.accumulation):
        least = layout.stages * layout.dp * batches.micro_batch
        raise InvalidArgument(
            f"a pipeline of {layout.stages} stages needs at least {layout.stages} micro batches, but there are "
            f"{batches.accumulation}: use train.global_batch={least} or more, or a smaller train.micro_batch"
        )
    if not layout.takes(batches.accumulation):
        low = next(count for count in range(batches.accumulation, 0, -1) if layout.takes(count))
        high = next(count for count in itertools.count(batches.accumulation) if layout.takes(count))
        each = layout.dp * batches.micro_batch
        raise InvalidArgument(
            f"an interleaved pipeline of {layout.pp} ranks needs equal rounds of micro batches, which "
            f"{batches.accumulation} micro batches do not form: use train.global_batch={low * each} or {high * each}, "
            "or schedule 1f1b"
        )
    return batches


def check_run(config: RunConfig, world: int) -> BatchSizes:
    """Check that a run is valid on `world` ranks, and return its batch sizes.

    Raises InvalidArgument, with the nearest valid choices.
    """
    config.layout.check(world, config.model, config.data.sequence)
    if config.data.sequence > config.model.max_position_embeddings:
        raise InvalidArgument(
            f"data.sequence={config.data.sequence} exceeds model.max_position_embeddings="
            f"{config.model.max_position_embeddings}, which readers of the checkpoint take as the limit; increase it"
        )
    if config.train.evaluate_every and not config.data.evaluation_samples:
        raise InvalidArgument(
            f"train.evaluate_every={config.train.evaluate_every}, but data.evaluation_samples=0 reserves no samples: "
            "set a number of samples, or evaluate_every=0"
        )
    return plan_batches(config)
