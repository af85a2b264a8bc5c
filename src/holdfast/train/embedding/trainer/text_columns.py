"""From a batch of texts to the columns of `GradCache`: tokens of each side, padded on the right, with dropout keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.train.embedding.micro_batches import MASK
from holdfast.train.embedding.pooling import pool, unit_vectors
from holdfast.train.embedding.replica_encoder import DROPOUT_KEYS, IDS
from holdfast.train.embedding.text_inputs import PROMPT_LENGTH, TextInputs
from holdfast.train.models.dropout import sample_keys

Column = dict[str, torch.Tensor]
_COLUMN_BITS = 48  # rows of a run: each column of a row has a number of its own above them


class TextColumns:
    """Makes the inputs of the model from texts.

    Args:
        text_inputs: Prompts and tokenizer.
        device: Where the inputs go.
        seed: The seed of dropout; None if the model has none, or draws from torch's generator.
        every_input: Keep all that the tokenizer returns, for models that take more than ids and mask.
    """

    def __init__(
        self, text_inputs: TextInputs, device: torch.device, seed: int | None, *, every_input: bool = False
    ) -> None:
        self._text_inputs = text_inputs
        self._device = device
        self._seed = seed
        self._every_input = every_input

    def side(self, texts: Sequence[str], side: str) -> Column:
        """Return the inputs for texts of one side, without dropout."""
        found = self._text_inputs(texts, side)
        names = found if self._every_input else [name for name in (IDS, MASK, PROMPT_LENGTH) if name in found]
        return {name: found[name].to(self._device) for name in names}

    def batch(self, columns: Sequence[Sequence[str]], step: int, first: int) -> list[Column]:
        """Return the columns of a batch whose first row has the number `first` in the run.

        Dropout follows from the step, and from row and column of a text, so that every layout drops the same.
        """
        found = [self.side(texts, "document" if number else "query") for number, texts in enumerate(columns)]
        if self._seed is not None:
            for number, column in enumerate(found):
                rows = (number << _COLUMN_BITS) + first
                column[DROPOUT_KEYS] = sample_keys(self._seed, step, rows, len(columns[number]), self._device)
        return found


class Pooling:
    """Makes vectors of hidden states as `EmbeddingModel` does."""

    def __init__(self, pooling: str, *, include_prompt: bool, normalize: bool) -> None:
        self._pooling = pooling
        self._include_prompt, self._normalize = include_prompt, normalize

    def __call__(self, hidden: torch.Tensor, inputs: Column) -> torch.Tensor:
        excluded = None if self._include_prompt else inputs.get(PROMPT_LENGTH)
        vectors = pool(hidden, inputs[MASK].bool(), self._pooling, excluded)
        return unit_vectors(vectors) if self._normalize else vectors
