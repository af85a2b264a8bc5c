"""Configs of a model as its vocabulary grows: the size, and the ids of special tokens, in all of its configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from holdfast.tokens.model_embeddings import Vocabulary

ROLES = ("bos_token", "eos_token", "pad_token")


def set_rows(vocabulary: Vocabulary, rows: int) -> None:
    """Write the number of rows where modules and configs name it."""
    for module in vocabulary.modules:
        for name in ("num_embeddings", "out_features"):
            if getattr(module, name, None) == vocabulary.rows:
                setattr(module, name, rows)
    for module in vocabulary.model.modules():
        if getattr(module, "vocab_size", None) == vocabulary.rows:  # transformers' models use it in their loss
            setattr(module, "vocab_size", rows)  # noqa: B010  (its type is not known)
        padding = getattr(module, "padding_idx", None)
        if isinstance(module, nn.Embedding) and padding is not None and padding < 0:
            module.padding_idx = padding + vocabulary.rows
    for config in _configs(vocabulary.model):
        if getattr(config, "vocab_size", None) == vocabulary.rows:
            config.vocab_size = rows


def set_ids(model: nn.Module, ids: Mapping[str, int]) -> None:
    """Write the ids of special tokens by role into the configs, and into the generation config.

    A generation config may end at several tokens: a new one comes first, the others stay.
    """
    generation = getattr(model, "generation_config", None)
    for role, number in ids.items():
        field = f"{role}_id"
        for config in _configs(model):
            if hasattr(config, field):
                setattr(config, field, number)
        if generation is not None:
            known = getattr(generation, field, None)
            several = isinstance(known, list)
            others = [other for other in known if other != number] if isinstance(known, list) else []
            setattr(generation, field, [number, *others] if several else number)


def _configs(model: nn.Module) -> list[Any]:
    """Return the config of a model and that of its text part, if it has configs."""
    config: Any = getattr(model, "config", None)
    if config is None or isinstance(config, Mapping):
        return []
    get = getattr(config, "get_text_config", None)
    inner = get() if callable(get) else config
    return [config] if inner is config else [config, inner]
