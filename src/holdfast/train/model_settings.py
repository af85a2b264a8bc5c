"""The check that a resumed run or loaded checkpoint has the same model settings, not only the same tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from holdfast.api import open_checkpoint
from holdfast.core.errors import Mismatch
from holdfast.train.models.model_config import ModelConfig

# Settings that may change between runs of the same model: they affect training only, or are only recorded.
_MAY_CHANGE = frozenset(
    {
        *("attention_dropout", "residual_dropout", "embedding_dropout", "router_aux_loss_coef"),
        *("initializer_range", "max_position_embeddings"),
    }
)


class ModelIdentity:
    """The settings of a run's model: saved with the run, and checked when it resumes.

    Matching shapes are not enough: with half as many heads of twice the size, or another rotary base,
    every tensor fits, but the model computes different results.
    """

    def __init__(self, model: ModelConfig) -> None:
        unused = {"intermediate_size"} if model.traits.experts else set()
        settings = dataclasses.asdict(model)
        self._settings = {name: settings[name] for name in settings if name not in _MAY_CHANGE | unused}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._settings)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise Mismatch if any setting differs."""
        self.check(state, "the checkpoint's model")

    def check(self, stored: Mapping[str, Any], whose: str) -> None:
        """Raise Mismatch if stored settings differ; `whose` names their owner in the message."""
        differing = [name for name, mine in self._settings.items() if stored.get(name) != mine]
        if differing:
            differences = ", ".join(f"{name}={stored.get(name)!r}, not {self._settings[name]!r}" for name in differing)
            raise Mismatch(
                f"{whose} has {differences}: the same weights would compute different results; set [model] to match"
            )


def check_same_model(path: str, model: ModelConfig) -> None:
    """Raise Mismatch if the config.json of a checkpoint describes a different model."""
    config = open_checkpoint(path).config()
    if config is not None:
        ModelIdentity(model).check(dataclasses.asdict(ModelConfig.from_hf(config)), f"{path} (config.json)")
