"""`EmbeddingConfig`, the whole config of an embedding run: read from TOML, model sizes taken from a folder if given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.api import open_checkpoint
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.train.checkpoints import CheckpointConfig
from holdfast.train.config import EmaConfig, TrainConfig
from holdfast.train.embedding.embedding_settings import EmbeddingSettings
from holdfast.train.embedding.sentence_files import MODULES
from holdfast.train.embedding.sentence_folder import read_sentence_folder
from holdfast.train.embedding.trainer.data_settings import EmbeddingDataConfig, EvaluationConfig
from holdfast.train.embedding.trainer.encoder_config import EncoderConfig
from holdfast.train.embedding.trainer.loss_settings import LossConfig
from holdfast.train.layout import Layout
from holdfast.train.models.model_config import FAMILIES, ModelConfig
from holdfast.train.optimizer_settings import OptimizerConfig
from holdfast.train.schedule import ScheduleConfig
from holdfast.train.settings import build, refuse_unknown, write_toml

_MICRO_BATCH = 32


@dataclass(frozen=True, slots=True)
class EmbeddingTrainConfig(TrainConfig):
    """The training loop. `global_batch` rows are compared with each other; they need not divide evenly over ranks.

    `micro_batch` texts are encoded at once, or texts with `micro_tokens` tokens.
    """

    micro_tokens: int | None = None

    def __post_init__(self) -> None:
        TrainConfig.__post_init__(self)  # super() does not find the class that slots=True makes
        for name in ("global_batch", "micro_batch", "micro_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(f"train.{name}={value} must be at least 1")
        if self.global_batch is None:
            raise InvalidArgument("train.global_batch is missing: the rows that the loss compares with each other")
        if self.accumulation is not None:
            raise InvalidArgument(
                "train.accumulation: the loss of an embedding model is that of the whole global batch, and memory "
                "follows train.micro_batch; leave accumulation out"
            )
        if self.micro_batch is not None and self.micro_tokens is not None:
            raise InvalidArgument("train.micro_batch and train.micro_tokens: give one of them")

    @property
    def rows_at_once(self) -> int:
        """The rows of a micro batch; of no use with `micro_tokens`."""
        return self.micro_batch or _MICRO_BATCH


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """The whole config of an embedding run."""

    model: ModelConfig | EncoderConfig
    data: EmbeddingDataConfig
    train: EmbeddingTrainConfig
    embedding: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    loss: LossConfig = field(default_factory=LossConfig)
    layout: Layout = field(default_factory=Layout)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)

    def to_toml(self) -> str:
        """Return the whole config as TOML, including defaults and the sizes that were taken from a folder."""
        return write_toml(dataclasses.asdict(self))

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return Path(self.data.tokenizer or weights_folder(self.train.start_from))

    def describe(self) -> str:
        """Return a line about the batches."""
        train, ranks = self.train, self.layout.dp
        assert train.global_batch is not None
        least, most = train.global_batch // ranks, -(-train.global_batch // ranks)
        rows = str(least) if least == most else f"{least} or {most}"
        at_once = f"{train.rows_at_once} texts" if train.micro_tokens is None else f"{train.micro_tokens} tokens"
        return f"global batch {train.global_batch} = {rows} rows x data parallel {ranks}, encoded {at_once} at a time"

    def check(self, world: int) -> None:
        """Raise InvalidArgument if the run is not valid on `world` ranks, NotFound if one of its files is missing."""
        self._check_layout(world)
        self.check_sizes()
        rows = self.train.global_batch or 0
        if rows < self.layout.dp:
            raise InvalidArgument(f"train.global_batch={rows} leaves some of {self.layout.dp} ranks without a row")
        if self.layout.pp > 1 and self.train.micro_tokens is not None:
            raise InvalidArgument("micro batches of a pipeline have one shape: use train.micro_batch, not micro_tokens")
        if self.train.evaluate_every and not self.evaluation.sets:
            raise InvalidArgument(
                f"train.evaluate_every={self.train.evaluate_every}, but there are no evaluation.sets: add one, or set "
                "evaluate_every=0"
            )
        for each in self.data.sets:
            each.open()  # checks its settings; the files are read by EmbeddingData
        self._check_files()

    def _check_layout(self, world: int) -> None:
        if isinstance(self.model, EncoderConfig):
            self.model.check_layout(self.layout, world)
            return
        self.layout.check(world, self.model)
        if self.model.traits.experts:
            raise Unsupported(f"embedding models of the family {self.model.family!r}: decoders with experts")

    def check_sizes(self) -> None:
        """Raise InvalidArgument for dims that the vectors do not have, and for options that the loss does not have."""
        self.embedding.check_width(self.model.hidden_size)
        self.loss.make(self.embedding.dims)

    def _check_files(self) -> None:
        missing = [path for path in [*self.data.files, *self.evaluation.files] if not Path(path).is_file()]
        missing += [] if self.tokenizer.is_dir() else [f"{self.tokenizer} (the folder of the tokenizer)"]
        if missing:
            more = f", and {len(missing) - 1} more of the config's files" if len(missing) > 1 else ""
            way = f"make them with: {self.data.made_by}" if self.data.made_by else "give paths that exist"
            raise NotFound(f"{missing[0]} is missing{more}, looked for from {Path.cwd()}: {way}")


def parse_embedding_config(tables: dict[str, Any]) -> EmbeddingConfig:
    """Build the config from its tables. Without sizes in [model], it is the model of `train.start_from`.

    `model.encoder` names an encoder of transformers, which is also what a run starts from unless it says otherwise. A
    folder of sentence-transformers gives the settings of [embedding] that are left out.
    """
    refuse_unknown(tables, [field.name for field in dataclasses.fields(EmbeddingConfig)], "")
    model = tables.get("model", {})
    if encoder := model.get("encoder", ""):
        tables = {**tables, "train": {"start_from": encoder, **tables.get("train", {})}}
    start = tables.get("train", {}).get("start_from", "")
    if not start:
        if not tables.get("data", {}).get("tokenizer"):
            raise InvalidArgument("data.tokenizer is missing: a folder with a tokenizer, or train.start_from with both")
        return build(EmbeddingConfig, tables, "")
    if "vocab_size" not in model:
        tables = {**tables, "model": _model_of(start, model)}
    if (Path(start) / MODULES).exists():
        found = dataclasses.asdict(read_sentence_folder(start).settings)
        tables = {**tables, "embedding": {**_without_none(found), **tables.get("embedding", {})}}
    elif isinstance(tables["model"], EncoderConfig):
        tables = {**tables, "embedding": {"pooling": "mean", **tables.get("embedding", {})}}
    return build(EmbeddingConfig, tables, "")


def _model_of(start: str, changes: dict[str, Any]) -> ModelConfig | EncoderConfig:
    """Return the model of a folder, with some settings changed."""
    if encoder := changes.get("encoder"):
        return _encoder({**changes, "encoder": weights_folder(str(encoder))})
    config = open_checkpoint(weights_folder(start)).config()
    if config is None:
        raise NotFound(f"train.start_from={start} has no config.json: give the sizes of the model in [model]")
    if config.get("model_type") not in FAMILIES:
        return _encoder({"encoder": weights_folder(start), **changes})
    refuse_unknown(changes, [field.name for field in dataclasses.fields(ModelConfig)], "model")
    return ModelConfig.from_hf(config, **changes)


def _encoder(table: dict[str, Any]) -> EncoderConfig:
    found = build(EncoderConfig, table, "model")
    found.hub_config()  # raises for what is no encoder
    return found


def weights_folder(start: str) -> str:
    """Return the folder with the tensors and the tokenizer of a start: those of sentence-transformers may be inside."""
    return str(read_sentence_folder(start).encoder) if (Path(start) / MODULES).exists() else start


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
