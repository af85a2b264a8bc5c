"""Numbers that programs need from config.json: heads, key-value heads, head size, layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import InvalidArgument

Config = Mapping[str, Any]

# A config file is untrusted input: no model repeats anything more often than this.
_LARGEST = 1_000_000


class MissingNumber(Exception):
    """A number that a program needs is not in the config; `args` are its names."""


def number(config: Config, *names: str) -> int:
    """Return the first of `names` that the config has. Raises MissingNumber."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise InvalidArgument(f"config.json: {name} is {value!r}; expected an integer up to {_LARGEST}")
        return value
    raise MissingNumber(names[0])


def number_or(config: Config, default: int, *names: str) -> int:
    try:
        return number(config, *names)
    except MissingNumber:
        return default


def numbers_or_none(config: Config, name: str) -> tuple[int, ...]:
    """Return a list of numbers, empty if the config has none."""
    value = config.get(name) or ()
    if not isinstance(value, list | tuple) or not all(isinstance(item, int) and item >= 0 for item in value):
        raise InvalidArgument(f"config.json: {name} is {value!r}; expected a list of integers")
    return tuple(value)


def heads(config: Config) -> int:
    return number(config, "num_attention_heads", "n_head")


def key_value_heads(config: Config) -> int:
    """Return the number of key and value heads, by default that of query heads."""
    return number_or(config, heads(config), "num_key_value_heads")


def head_size(config: Config) -> int:
    every = heads(config)
    return number_or(config, number(config, "hidden_size", "n_embd") // max(every, 1), "head_dim")


def layers(config: Config) -> int:
    return number(config, "num_hidden_layers", "n_layer")
