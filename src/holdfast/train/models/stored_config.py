"""`StoredConfig`, the config attribute of a module, from which a save gets config.json without transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.train.models.model_config import ModelConfig


class StoredConfig:
    """Implements the parts of a Hugging Face config that Holdfast uses: a dict, a file, tied weights.

    Args:
        model: The decoder's sizes and traits.
        head: False for the decoder's body, which transformers calls Qwen3Model, say, and not Qwen3ForCausalLM.
        extra: More settings of config.json.
    """

    def __init__(self, model: ModelConfig, *, head: bool = True, extra: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self.extra = dict(extra or {})
        self.dtype: str | None = None
        name = model.traits.architecture
        self._architecture = name if head else name.removesuffix("ForCausalLM") + "Model"
        self.architectures = [self._architecture]  # a save sets this to the trainer's class

    @property
    def tie_word_embeddings(self) -> bool:
        return self.model.tie_word_embeddings

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json. The architecture is the class in transformers, not this trainer's."""
        content = {**self.model.to_hf(), "architectures": [self._architecture], **self.extra}
        return content if self.dtype is None else {**content, "dtype": self.dtype}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        (Path(folder) / "config.json").write_text(text + "\n", encoding="utf-8")
