"""`EncoderConfig`, the [model] of a run that trains an encoder of transformers: a folder, and what is changed of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.train.embedding.open_model import LOCAL, import_transformers, summary
from holdfast.train.layout import Layout
from holdfast.train.models.model_config import FAMILIES
from holdfast.train.settings import refuse_unknown

# Settings of config.json that affect training only, or are only recorded.
_MAY_CHANGE = ("drop", "initializer", "use_cache", "label", "architectures", "dtype", "version", "_name_or_path")
_MAY_CHANGE_TOO = ("is_causal", "matryoshka_dimensions")  # written from the settings of [embedding]
_ONE = ("tp", "pp", "ep", "stages_per_rank")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder of transformers, such as BERT or ModernBERT, as the folder `encoder` has it.

    `changes` are settings of its config.json that differ, such as `hidden_dropout_prob`.
    """

    encoder: str
    changes: Mapping[str, int | float | bool | str] = field(default_factory=dict)

    def hub_config(self) -> Any:
        """Return the config of transformers. Raises NotFound, InvalidArgument, or Unsupported for no such encoder."""
        folder = Path(self.encoder)
        if not folder.is_dir():
            raise NotFound(f"model.encoder={self.encoder} is not a folder: download the model of the hub first")
        transformers = import_transformers(folder)
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        except Exception as error:
            raise InvalidArgument(f"{folder}: transformers cannot open config.json: {summary(error)}") from error
        if config.model_type in FAMILIES:
            raise InvalidArgument(
                f"model.encoder={self.encoder} is a {config.model_type}, a decoder that the trainer has itself: "
                "use train.start_from, without model.encoder"
            )
        if config.is_encoder_decoder:
            raise Unsupported(
                f"model.encoder={self.encoder}: {config.model_type} is an encoder-decoder: its decoder needs inputs too"
            )
        known = config.to_dict()
        refuse_unknown(self.changes, [*known, *config.attribute_map], "model.changes")
        for name, value in self.changes.items():
            setattr(config, name, value)
        config.use_cache = False
        return config

    @property
    def family(self) -> str:
        return str(self.hub_config().model_type)

    @property
    def hidden_size(self) -> int:
        return int(self.hub_config().hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.hub_config().vocab_size)

    @property
    def max_position_embeddings(self) -> int | None:
        return getattr(self.hub_config(), "max_position_embeddings", None)

    def check_layout(self, layout: Layout, world: int) -> None:
        """Raise Unsupported for a layout that divides the encoder itself, InvalidArgument for one that does not fit."""
        divided = [f"{name}={getattr(layout, name)}" for name in _ONE if getattr(layout, name) > 1]
        if divided:
            raise Unsupported(
                f"layout {layout}: {' '.join(divided)} divides a model, which encoders of transformers ({self.family}) "
                f"do not support; use dp_replicate, dp_shard or zero1"
            )
        if layout.zero1 and layout.dp_shard > 1:
            raise InvalidArgument(
                f"layout {layout}: zero1 supports only dp_replicate; dp_shard already shards the optimizer's state"
            )
        if layout.world != world:
            raise InvalidArgument(
                f"layout {layout} needs {layout.world} ranks (dp_replicate x dp_shard), but there are {world} (set by "
                "--nproc, or torchrun's --nproc-per-node)"
            )


class EncoderIdentity:
    """The settings of a run's encoder: saved with the run, and checked when it resumes."""

    def __init__(self, config: Any) -> None:
        settings = json.loads(json.dumps(config.to_dict(), default=str))
        self._settings = {name: value for name, value in settings.items() if not _may_change(name)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._settings)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise Mismatch if any setting differs; a setting that only one release of transformers has is passed over."""
        both = self._settings.keys() & state.keys()
        differing = sorted(name for name in both if state[name] != self._settings[name])
        if differing or "model_type" not in state:
            found = ", ".join(f"{name}={state[name]!r}, not {self._settings[name]!r}" for name in differing)
            raise Mismatch(
                f"the checkpoint's model has {found or 'no model_type'}: the same weights would compute different "
                "results; set [model] to match"
            )


def _may_change(name: str) -> bool:
    return name in _MAY_CHANGE_TOO or any(part in name for part in _MAY_CHANGE)
