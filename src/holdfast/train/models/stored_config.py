"""`StoredConfig`, the config attribute of a module, from which a save gets config.json without transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from holdfast.train.models.model_config import ModelConfig


class StoredConfig:
    """Implements the parts of a Hugging Face config that Holdfast uses: a dict, a file, tied weights."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.dtype: str | None = None
        self.architectures = [model.traits.architecture]

    @property
    def tie_word_embeddings(self) -> bool:
        return self.model.tie_word_embeddings

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json. The architecture is the class in transformers, not this trainer's."""
        content = self.model.to_hf()
        return content if self.dtype is None else {**content, "dtype": self.dtype}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        (Path(folder) / "config.json").write_text(text + "\n", encoding="utf-8")
