"""`EmbeddingTrainer`: trains, evaluates, saves and resumes an embedding model on every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.train.embedding.data import EmbeddingData, TextBatch
from holdfast.train.embedding.embedding_settings import EmbeddingSettings
from holdfast.train.embedding.evaluation import RetrievalSet, evaluate_retrieval, evaluate_similarity
from holdfast.train.embedding.grad_cache import GradCache
from holdfast.train.embedding.losses import InfoNCE, Matryoshka
from holdfast.train.embedding.micro_batches import MASK
from holdfast.train.embedding.open_model import open_tokenizer, with_limit
from holdfast.train.embedding.text_inputs import TextInputs
from holdfast.train.embedding.trainer.data_settings import HeldOut
from holdfast.train.embedding.trainer.embedding_config import EmbeddingConfig
from holdfast.train.embedding.trainer.text_columns import TextColumns
from holdfast.train.embedding.trainer.trained_model import make_trained_model
from holdfast.train.training_run import BatchLoss, TrainingRun

_VECTORS = ("pooling", "causal", "include_prompt", "normalize", "prompts", "default_prompt", "max_length")


class EmbeddingTrainer(TrainingRun):
    """One rank's part of a run that trains an embedding model: `run` trains to the last step, or resumes.

    Every rank creates one with the same config; the methods are collective. Each saved step is a checkpoint of the
    whole run and a folder of sentence-transformers.

    Args:
        config: The settings of the run, as `open_run` reads them from a TOML file.
        device: Where this rank trains.

    Raises InvalidArgument for an invalid layout, and for rows that cannot be trained on, before anything is written.
    """

    position: EmbeddingData

    def __init__(self, config: EmbeddingConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        train = config.train
        config.check(dist.get_world_size() if dist.is_initialized() else 1)
        tokenizer = open_tokenizer(config.tokenizer)
        _check_vocabulary(len(tokenizer), config)
        self.settings = with_limit(config.embedding, tokenizer, config.model.max_position_embeddings)
        data = config.data.open(train.global_batch or 0)
        data.require(labels=config.loss.kind == "cosent", scores=config.loss.kind in ("margin_mse", "kl"))
        self._held_out = config.evaluation.open()
        self._trained = make_trained_model(config, self.settings, tokenizer, device)
        replica = self._trained.replica
        super().__init__(config, replica, self._trained.stored, data)
        self.loss = config.loss.make(self.settings.dims).to(replica.device)
        if parameters := list(self.loss.parameters()):
            self.optimizer.add_param_group({"params": parameters, "weight_decay": 0.0})
        self._group = self._trained.encode.group
        self.cache = GradCache(
            self._trained.encode,
            self.loss,
            micro_batch=train.rows_at_once,
            micro_tokens=train.micro_tokens,
            sort=True,
        )
        self._columns = TextColumns(
            TextInputs(tokenizer, self.settings),
            replica.device,
            self._trained.dropout_seed,
            every_input=self._trained.every_input,
        )

    def state(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as a state to save."""
        state = {**super().state(), "vectors": VectorIdentity(self.settings)}
        return {**state, "loss": self.loss} if list(self.loss.parameters()) else state

    def _gradients(self, step: int) -> BatchLoss:
        rank, ranks = self.replica.meshes.dp_rank, self.config.layout.dp
        batch = self.position.batch(rank, ranks)
        first = self.position.consumed_samples + rank * self.position.global_batch // ranks
        columns = self._columns.batch(batch.columns, step, first)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.cache.step(columns, **self._extras(batch))
        more: dict[str, Any] = {"set": batch.name}
        if self._learned is not None:
            more["temperature"] = self._learned.temperature
        return BatchLoss(float(loss), self._tokens(columns), more)

    def _extras(self, batch: TextBatch) -> dict[str, Any]:
        """Return what the loss is given beside the embeddings."""
        given = {"infonce": ("texts", batch.texts), "cosent": ("labels", batch.labels)}
        name, values = given.get(self.config.loss.kind, ("scores", batch.scores))
        assert values is not None  # require has checked the sets
        return {name: values.to(self.replica.device)}

    @property
    def _learned(self) -> InfoNCE | None:
        """The loss whose temperature is trained, if it is."""
        loss = self.loss.loss if isinstance(self.loss, Matryoshka) else self.loss
        return loss if isinstance(loss, InfoNCE) and loss.log_scale is not None else None

    def _tokens(self, columns: list[dict[str, torch.Tensor]]) -> int:
        """Return the tokens of the global batch."""
        tokens = torch.stack([column[MASK].sum() for column in columns]).sum()
        if self._group is not None:
            dist.all_reduce(tokens, group=self._group)
        return int(tokens)

    def _advance(self) -> None:
        self.position.advance()

    def _files(self) -> Mapping[str, bytes]:
        return self._trained.files

    @property
    def _identity(self) -> Any:
        return self._trained.identity

    def _load_weights(self, path: str) -> None:
        self._trained.load_weights(path)

    def evaluate(self) -> dict[str, float]:
        """Return the measures of every held-out set, named "set/measure"."""
        found: dict[str, float] = {}
        for name, held_out in self._held_out.items():
            found |= {f"{name}/{measure}": value for measure, value in self._evaluate(held_out).items()}
        return found

    def _evaluate(self, held_out: HeldOut) -> dict[str, float]:
        config, similarity = self.config.evaluation, self.settings.similarity
        options: Any = {
            "batch": config.batch,
            "similarity": "dot" if similarity == "dot" else "cosine",
            "group": self._group,
        }
        if isinstance(held_out, RetrievalSet):
            return evaluate_retrieval(held_out, self._encode, recall_at=config.recall_at, **options)
        return evaluate_similarity(held_out, self._encode, **options)

    def _encode(self, texts: list[str], side: str) -> torch.Tensor:
        with self._trained.evaluating():
            return self.cache.encode(self._columns.side(texts, side))

    def _measures(self) -> dict[str, Any] | None:
        return self.evaluate() or None


class VectorIdentity:
    """The settings by which vectors are made: saved with the run, and checked when it resumes."""

    def __init__(self, settings: EmbeddingSettings) -> None:
        values = dataclasses.asdict(settings)
        self._settings = {name: values[name] for name in _VECTORS}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._settings)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise Mismatch if any setting differs."""
        differing = [name for name, mine in self._settings.items() if state.get(name) != mine]
        if differing:
            differences = ", ".join(f"{name}={state.get(name)!r}, not {self._settings[name]!r}" for name in differing)
            raise Mismatch(
                f"the checkpoint's embedding has {differences}: the same weights would make other vectors; set "
                "[embedding] to match"
            )


def _check_vocabulary(tokens: int, config: EmbeddingConfig) -> None:
    if tokens > config.model.vocab_size:
        raise InvalidArgument(
            f"the tokenizer of {config.tokenizer} has {tokens} tokens, but model.vocab_size={config.model.vocab_size}"
        )
