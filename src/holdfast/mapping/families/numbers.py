"""Numbers that programs need, read out of a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import InvalidArgument

Config = Mapping[str, Any]

# A config file is somebody else's: no model has more of anything that programs are repeated for.
_MOST = 1_000_000


class Missing(Exception):
    """A number that a program needs and the config does not have; `args` are the names of it."""


def number(config: Config, *names: str) -> int:
    """The first of `names` that the config has; raises Missing."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise InvalidArgument(f"config.json: {name} is {value!r}; expected a whole number up to {_MOST}")
        return value
    raise Missing(names[0])


def number_or(config: Config, default: int, *names: str) -> int:
    try:
        return number(config, *names)
    except Missing:
        return default


def numbers_or_none(config: Config, name: str) -> tuple[int, ...]:
    """A list of numbers, empty where the config has none."""
    value = config.get(name) or ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, int) and item >= 0 for item in value):
        raise InvalidArgument(f"config.json: {name} is {value!r}; expected a list of whole numbers")
    return tuple(value)


def heads(config: Config) -> int:
    return number(config, "num_attention_heads", "n_head")


def key_value_heads(config: Config) -> int:
    """As many as there are query heads where the config does not say."""
    return number_or(config, heads(config), "num_key_value_heads")


def head_size(config: Config) -> int:
    every = heads(config)
    return number_or(config, number(config, "hidden_size", "n_embd") // max(every, 1), "head_dim")


def layers(config: Config) -> int:
    return number(config, "num_hidden_layers", "n_layer")
