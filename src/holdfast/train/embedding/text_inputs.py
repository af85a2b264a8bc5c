"""From texts to the inputs of an embedding model: prompt, tokens, and the length of the prompt in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.embedding_settings import EmbeddingSettings
from holdfast.train.embedding.micro_batches import MASK
from holdfast.train.embedding.pooling import pad_right

PROMPT_LENGTH = "prompt_length"


class TextInputs:
    """Puts prompts in front of texts and tokenizes them, with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, settings: EmbeddingSettings) -> None:
        if tokenizer.pad_token_id is None:
            raise InvalidArgument("the tokenizer has no padding token, so texts cannot share a batch: set pad_token")
        self.tokenizer = tokenizer
        self._settings = settings
        self._prompt_lengths: dict[str, int] = {}

    def __call__(self, texts: Sequence[str], prompt_name: str | None = None) -> dict[str, torch.Tensor]:
        """Return the inputs of a model for texts of one side, padded on the right to the longest.

        Raises InvalidArgument for a name that is not in the settings, and for a text without any token.
        """
        prompt = self._settings.prompt(prompt_name)
        inputs = pad_right(self._tokens([prompt + text for text in texts]))
        empty = (inputs[MASK].sum(1) == 0).nonzero()
        if len(empty):
            raise InvalidArgument(f"text {int(empty[0])}, {texts[int(empty[0])]!r}, has no tokens, and so no vector")
        if prompt and not self._settings.include_prompt:
            inputs[PROMPT_LENGTH] = torch.full((len(texts),), self._prompt_length(prompt))
        return inputs

    def _tokens(self, texts: list[str]) -> dict[str, torch.Tensor]:
        limit = {} if self._settings.max_length is None else {"max_length": self._settings.max_length}
        found = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt", **limit)
        return dict(found)

    def _prompt_length(self, prompt: str) -> int:
        """Return how many tokens of a text are those of its prompt, and of what the tokenizer begins every text with.

        A token at the end that the tokenizer adds, such as [SEP], is not the prompt's.
        """
        if prompt not in self._prompt_lengths:
            tokens = self._tokens([prompt])["input_ids"][0].tolist()
            ends = bool(tokens) and tokens[-1] in self.tokenizer.all_special_ids
            self._prompt_lengths[prompt] = len(tokens) - ends
        return self._prompt_lengths[prompt]
