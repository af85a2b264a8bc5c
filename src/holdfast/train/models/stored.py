"""The config that a module carries so that a checkpoint gets its config.json, without transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from holdfast.train.models.config import ModelConfig


class StoredConfig:
    """Looks to Holdfast as a Hugging Face config does: a dict, a file, and whether weights are tied."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.dtype: str | None = None
        self.architectures = [model.traits.architecture]

    @property
    def tie_word_embeddings(self) -> bool:
        return self.model.tie_word_embeddings

    def to_dict(self) -> dict[str, Any]:
        """What config.json says. The architecture is transformers' class, not the one that trains here."""
        said = self.model.to_hf()
        return said if self.dtype is None else {**said, "dtype": self.dtype}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True)
        (Path(folder) / "config.json").write_text(text + "\n", encoding="utf-8")
