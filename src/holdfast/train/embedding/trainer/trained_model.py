"""The model of an embedding run: a decoder of the trainer on any layout, or an encoder of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.api import load, open_checkpoint
from holdfast.train.embedding.embedding_model import EmbeddingModel, config_extra
from holdfast.train.embedding.embedding_settings import EmbeddingSettings
from holdfast.train.embedding.open_model import body_mapping
from holdfast.train.embedding.replica_encoder import EncodedReplica, ReplicaEncoder
from holdfast.train.embedding.sentence_files import sentence_files, tokenizer_files
from holdfast.train.embedding.trainer.embedding_config import EmbeddingConfig, weights_folder
from holdfast.train.embedding.trainer.encoder_config import EncoderConfig, EncoderIdentity
from holdfast.train.embedding.trainer.encoder_replica import EncoderOfReplica, build_encoder
from holdfast.train.embedding.trainer.text_columns import Pooling
from holdfast.train.model_settings import ModelIdentity, check_same_model
from holdfast.train.models.decoder import Decoder
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.parallel_model import build
from holdfast.train.parallel.replica import Replica


class TrainedModel(ABC):
    """The model of a run, for `EmbeddingTrainer`."""

    replica: Replica
    stored: nn.Module  # whose tensors are saved
    encode: EncodedReplica
    dropout_seed: int | None  # None if no dropout keys are needed
    every_input: bool  # True if it takes all that the tokenizer returns
    identity: Any  # the settings that a checkpoint must have
    files: Mapping[str, bytes]  # published with every step

    @abstractmethod
    def load_weights(self, start: str) -> None:
        """Load initial weights. Collective."""

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """Encode without dropout within this context."""


class TrainedDecoder(TrainedModel):
    """A Llama, Qwen2 or Qwen3 of the trainer, on every layout."""

    every_input = False

    def __init__(
        self,
        config: EmbeddingConfig,
        model: ModelConfig,
        settings: EmbeddingSettings,
        tokenizer: Any,
        device: torch.device | str,
    ) -> None:
        train = config.train
        dtype = getattr(torch, train.dtype)
        replica = build(model, config.layout, device, dtype, train.seed, recompute=train.recompute, head=False)
        replica.module.config.extra = replica.module.model.config.extra = config_extra(settings)
        pooling = Pooling(settings.pooling, include_prompt=settings.include_prompt, normalize=settings.normalize)
        self._config = model
        self.replica = replica
        self.stored = replica.module.model
        self.encode = ReplicaEncoder(replica, pooling, causal=settings.causal)
        self.dropout_seed = train.seed if model.drops else None
        self.identity = ModelIdentity(model)
        self.files = sentence_files(settings, model.hidden_size) | tokenizer_files(tokenizer)

    def load_weights(self, start: str) -> None:
        """Load initial weights from a checkpoint of any layout, format or dtype, with a head or without one."""
        path = weights_folder(start)
        check_same_model(path, self._config)
        with torch.device("meta"):
            whole = Decoder(self._config, head=False)
        mapping = body_mapping(whole, open_checkpoint(path).keys("model"))
        load(path, {"model": self.stored}, mapping=mapping, mesh=self.replica.meshes.dense, cast=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inputs without dropout keys drop nothing."""
        yield


class TrainedEncoder(TrainedModel):
    """An encoder of transformers, on data-parallel ranks. Its folder's weights are there from the beginning."""

    every_input = True
    dropout_seed = None

    def __init__(
        self,
        config: EmbeddingConfig,
        model: EncoderConfig,
        settings: EmbeddingSettings,
        tokenizer: Any,
        device: torch.device | str,
    ) -> None:
        train = config.train
        hub = model.hub_config()
        self.identity = EncoderIdentity(hub)
        self.replica = build_encoder(
            model.encoder, hub, config.layout, device, seed=train.seed, recompute=train.recompute
        )
        self.stored = self.replica.module
        whole = EmbeddingModel(self.stored, settings, tokenizer)
        self.encode = EncoderOfReplica(self.replica, whole, getattr(torch, train.dtype))
        self.files = whole.files()
        self._folder = Path(model.encoder)

    def load_weights(self, start: str) -> None:
        """Load the weights of `start`, unless they are those of the encoder's folder."""
        path = Path(weights_folder(start))
        if path.resolve() != self._folder.resolve():
            load(path, {"model": self.stored}, mesh=self.replica.meshes.dense, cast=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.stored.eval()
        try:
            yield
        finally:
            self.stored.train()


def make_trained_model(
    config: EmbeddingConfig, settings: EmbeddingSettings, tokenizer: Any, device: torch.device | str
) -> TrainedModel:
    """Build the model that the config names. Collective."""
    if isinstance(config.model, EncoderConfig):
        return TrainedEncoder(config, config.model, settings, tokenizer, device)
    return TrainedDecoder(config, config.model, settings, tokenizer, device)
