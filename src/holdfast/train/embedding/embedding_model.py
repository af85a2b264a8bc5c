"""An embedding model: a decoder of the trainer, or an encoder of transformers, with pooling and normalization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.train.embedding.embedding_settings import EmbeddingSettings
from holdfast.train.embedding.micro_batches import MASK
from holdfast.train.embedding.pooling import pad_right, pool, unit_vectors
from holdfast.train.embedding.sentence_files import sentence_files, tokenizer_files
from holdfast.train.embedding.text_inputs import PROMPT_LENGTH, TextInputs
from holdfast.train.models.decoder import Decoder

IDS, DROPOUT_KEYS = "input_ids", "dropout_keys"


class EmbeddingModel(nn.Module):
    """Maps tokenized texts to their vectors, the same ones whichever side the padding is on.

    Args:
        encoder: A `Decoder` without a head, or a model of transformers whose output has last_hidden_state.
        settings: Pooling, attention, prompts, normalization.
        tokenizer: A tokenizer of transformers, for `tokenize`, `encode` and `files`.

    Called with the dict of tensors that a tokenizer returns: `input_ids`, `attention_mask`, and what else an encoder
    of transformers takes. `prompt_length`, [rows], are the tokens that `include_prompt=False` leaves out, and
    `dropout_keys`, [rows], determine the dropout of a decoder in training (`models.dropout.sample_keys`).
    """

    def __init__(self, encoder: nn.Module, settings: EmbeddingSettings, tokenizer: Any = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.settings = settings
        self.text_inputs = None if tokenizer is None else TextInputs(tokenizer, settings)
        settings.check_width(self.width)
        if isinstance(encoder, Decoder):
            _check_decoder(encoder)
            encoder.config.extra = config_extra(settings)
        else:
            config: Any = encoder.config
            for name, value in config_extra(settings).items():
                setattr(config, name, value)

    @property
    def keyed_dropout(self) -> bool:
        """True if dropout follows from `dropout_keys`, and not from the order of the rows."""
        return isinstance(self.encoder, Decoder)

    @property
    def width(self) -> int:
        """The numbers of a vector."""
        config: Any = self.encoder.config
        return int((config.model if isinstance(self.encoder, Decoder) else config).hidden_size)

    @property
    def stored(self) -> nn.Module:
        """The module whose tensors have the names of the hub's embedding models."""
        return self.encoder.model if isinstance(self.encoder, Decoder) else self.encoder

    def state(self) -> dict[str, Any]:
        """Return the state for `holdfast.save`, `load` and `Checkpointer`; give them `files` too."""
        return {"model": self.stored}

    def files(self) -> dict[str, bytes]:
        """Return the files that make a saved step a folder of sentence-transformers, for the `files` of a save.

        The tokenizer of an encoder of transformers is saved with padding on the right: transformers counts the
        positions of most of them from the first token, padding or not.
        """
        if self.text_inputs is None:
            raise InvalidArgument("a folder of sentence-transformers needs a tokenizer: give one to EmbeddingModel")
        side = None if isinstance(self.encoder, Decoder) else "right"
        return sentence_files(self.settings, self.width) | tokenizer_files(
            self.text_inputs.tokenizer, padding_side=side
        )

    def forward(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the vectors of texts, [rows, width]."""
        if not isinstance(inputs, Mapping):
            raise InvalidArgument(f"the inputs are a {type(inputs).__name__}; expected what tokenize returns")
        if MASK not in inputs:
            raise InvalidArgument(f"the inputs have no {MASK!r}, which says what is padding")
        inputs = pad_right(inputs)
        mask = inputs[MASK].bool()
        hidden = self._decoded(inputs, mask) if isinstance(self.encoder, Decoder) else self._encoded(inputs)
        excluded = None if self.settings.include_prompt else inputs.get(PROMPT_LENGTH)
        vectors = pool(hidden, mask, self.settings.pooling, excluded)
        return unit_vectors(vectors) if self.settings.normalize else vectors

    def _decoded(self, inputs: Mapping[str, Any], mask: torch.Tensor) -> torch.Tensor:
        keys = inputs.get(DROPOUT_KEYS) if self.training else None
        if self.training and keys is None and _drops(self.encoder):
            raise InvalidArgument(
                f"the model has dropout but the inputs have no {DROPOUT_KEYS!r}, so dropout would have no effect: "
                "take them from models.dropout.sample_keys, or set the model's dropout to 0"
            )
        visible = None
        if not self.settings.causal:
            visible = mask | (torch.arange(mask.shape[1], device=mask.device) == 0)  # a query without any key is NaN
        hidden: torch.Tensor = self.encoder(inputs[IDS], keys=keys, visible=visible)
        return hidden

    def _encoded(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        own = {PROMPT_LENGTH, DROPOUT_KEYS}
        hidden: torch.Tensor = self.encoder(
            **{name: value for name, value in inputs.items() if name not in own}
        ).last_hidden_state
        return hidden

    def tokenize(self, texts: Sequence[str], prompt_name: str | None = None) -> dict[str, torch.Tensor]:
        """Return the inputs for texts of one side; `prompt_name` is "query", "document" or another prompt's name."""
        if self.text_inputs is None:
            raise InvalidArgument("the embedding model has no tokenizer: give it one, or tokenized texts")
        return self.text_inputs(texts, prompt_name)

    @torch.no_grad()
    def encode(self, texts: Sequence[str], prompt_name: str | None = None, *, batch_size: int = 32) -> torch.Tensor:
        """Return the vectors of texts as sentence-transformers does: without dropout, on the CPU, [texts, dim]."""
        device = next(self.encoder.parameters()).device
        order = sorted(
            range(len(texts)), key=lambda number: -len(texts[number])
        )  # rows of similar length share a batch
        was_training = self.training
        self.eval()
        try:
            parts = []
            for begin in range(0, len(order), batch_size):
                batch = self.tokenize([texts[number] for number in order[begin : begin + batch_size]], prompt_name)
                vectors = self({name: value.to(device) for name, value in batch.items()})
                parts.append(vectors[:, : self.settings.truncate_dim].cpu())
        finally:
            self.train(was_training)
        if not parts:
            return torch.empty(0, self.settings.truncate_dim or self.width)
        return torch.cat(parts)[torch.tensor(order).argsort()]


def _check_decoder(decoder: Decoder) -> None:
    if decoder.has_head:
        raise InvalidArgument("an embedding model needs hidden states: make the decoder with head=False")
    if decoder.config.model.traits.experts:
        raise Unsupported(f"embedding models of the family {decoder.config.model.family!r}: decoders with experts")


def _drops(encoder: Any) -> bool:
    return bool(encoder.config.model.drops)


def config_extra(settings: EmbeddingSettings) -> dict[str, Any]:
    """Return what transformers and servers find in config.json beside the decoder's sizes."""
    extra: dict[str, Any] = {} if settings.causal else {"is_causal": False}
    return extra | ({"matryoshka_dimensions": list(settings.dims)} if settings.dims else {})
