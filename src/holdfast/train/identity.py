"""Which model a run trains, beside its weights: the same tensors under other settings are another model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from holdfast.api import open_checkpoint
from holdfast.core.errors import Mismatch
from holdfast.train.models.config import ModelConfig

# What may change while a model stays what it is: how it is trained, and what is only written down.
_MAY_CHANGE = frozenset(
    {
        *("attention_dropout", "residual_dropout", "embedding_dropout", "router_aux_loss_coef"),
        *("initializer_range", "max_position_embeddings"),
    }
)


class Identity:
    """The settings of a run's model: saved with it, and checked when it resumes.

    Shapes alone do not tell: with half as many heads of twice the size, or with another
    rotary base, every tensor fits and every number that is computed is another.
    """

    def __init__(self, model: ModelConfig) -> None:
        unused = {"intermediate_size"} if model.traits.experts else set()
        settings = dataclasses.asdict(model)
        self._settings = {name: settings[name] for name in settings if name not in _MAY_CHANGE | unused}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._settings)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises Mismatch with every setting that differs."""
        self.check(state, "the checkpoint's model")

    def check(self, stored: Mapping[str, Any], whose: str) -> None:
        """Compare with the settings of another, which `whose` names."""
        differing = [name for name, mine in self._settings.items() if stored.get(name) != mine]
        if differing:
            told = ", ".join(f"{name}={stored.get(name)!r}, not {self._settings[name]!r}" for name in differing)
            raise Mismatch(f"{whose} has {told}: the same weights would compute something else; set [model] to it")


def check_same_model(path: str, model: ModelConfig) -> None:
    """Refuse the weights of another model, where a config.json beside them says what they are."""
    said = open_checkpoint(path).config()
    if said is not None:
        Identity(model).check(dataclasses.asdict(ModelConfig.from_hf(said)), f"{path} (config.json)")
