"""Built-in mappings of model families from Hugging Face keys to others: by name, or found from config.json.

A name is `<family>-<variant>`, as in `llama-fused`; `<family>-from-<variant>` is its reverse. A variant
without a family (`fused`, `from-megatron`) applies to the family given by the model's config.json.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.families.deepseek_v3 import DEEPSEEK_V3
from holdfast.mapping.families.family import ModelFamily
from holdfast.mapping.families.gpt2 import GPT2
from holdfast.mapping.families.llama import LLAMA
from holdfast.mapping.families.mixtral import MIXTRAL
from holdfast.mapping.families.qwen2 import QWEN2
from holdfast.mapping.families.qwen3 import QWEN3
from holdfast.mapping.families.qwen3_moe import QWEN3_MOE

__all__ = [
    "FAMILIES",
    "BuiltinProgram",
    "ModelFamily",
    "builtin_program",
    "family_of",
    "is_name",
    "is_reverse",
    "named_family",
    "names",
    "nearest",
    "opposite",
]

FAMILIES = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3, GPT2)
_REVERSE_PREFIX = "from-"


@dataclass(frozen=True, slots=True)
class BuiltinProgram:
    """A built-in program: its text, starting from Hugging Face keys, and whether to reverse it.

    `renames` are alternative names for parts of its targets, which the reverse accepts as well.
    """

    name: str
    text: str
    reversed: bool
    renames: Mapping[str, str] = field(default_factory=dict)


def names() -> tuple[str, ...]:
    """Return the names of all built-in mappings; `from-` before the variant reverses a mapping."""
    return tuple(f"{family.name}-{variant}" for family in FAMILIES for variant in family.programs)


def is_name(name: str) -> bool:
    """Return True if a built-in mapping has this name, with or without its family."""
    family, variant = _split(name.replace("_", "-"))
    return any(variant in each.programs for each in ((family,) if family else FAMILIES))


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a model by the model_type or architectures of its config.json."""
    model_type, architectures = config.get("model_type"), config.get("architectures") or ()
    for family in FAMILIES:
        if model_type in family.model_types or any(name in family.architectures for name in architectures):
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise InvalidArgument(
        f"config.json has model_type {model_type!r}, a family without built-in mappings (known: {known}); "
        "write the mapping as statements"
    )


def builtin_program(
    name: str, config: Mapping[str, Any] | None = None, keys: Iterable[str] | None = None
) -> BuiltinProgram:
    """Return the built-in mapping of that name.

    `config` is the model's config.json. It provides numbers for some programs, and the family for names
    without one. `keys` are the Hugging Face keys, if known; they show whether keys have the model prefix.
    Raises InvalidArgument for an unknown name, or if the config lacks a needed number.
    """
    word = name.replace("_", "-")
    family, variant = _split(word)
    if family is None:
        if not is_name(name):
            raise InvalidArgument(f"there is no built-in mapping {name!r}; {nearest(name)}")
        if config is None:
            full = ", ".join(f"{each.name}-{word}" for each in FAMILIES if variant in each.programs)
            raise InvalidArgument(f"the mapping {name!r} needs a config.json or the name of the family: {full}")
        family = family_of(config)
    return BuiltinProgram(name, family.program(variant, config, keys, name), is_reverse(name), family.renames)


def _split(word: str) -> tuple[ModelFamily | None, str]:
    """Return the family that a name begins with, if any, and the variant that follows."""
    for family in sorted(FAMILIES, key=lambda family: -len(family.name)):
        if word.startswith(f"{family.name}-"):
            return family, word.removeprefix(f"{family.name}-").removeprefix(_REVERSE_PREFIX)
    return None, word.removeprefix(_REVERSE_PREFIX)


def named_family(name: str) -> ModelFamily | None:
    """Return the family that the name of a built-in mapping begins with; None for a variant alone."""
    return _split(name.replace("_", "-"))[0]


def is_reverse(name: str) -> bool:
    """Return True if the named mapping produces Hugging Face keys instead of reading them."""
    word = name.replace("_", "-")
    family, _ = _split(word)
    return (word if family is None else word.removeprefix(f"{family.name}-")).startswith(_REVERSE_PREFIX)


def opposite(name: str) -> str:
    """Return the name of the reverse of a named mapping."""
    word = name.replace("_", "-")
    family, variant = _split(word)
    prefix = "" if family is None else f"{family.name}-"
    return f"{prefix}{'' if is_reverse(name) else _REVERSE_PREFIX}{variant}"


def nearest(word: str) -> str:
    """Return a hint with the built-in name that a word is a misspelling of, or with several that it may be."""
    every = [*names(), *sorted({variant for family in FAMILIES for variant in family.programs})]
    word = word.replace("_", "-")
    if _REVERSE_PREFIX in word:
        every = [opposite(name) for name in every]
    near = difflib.get_close_matches(word, every, n=1, cutoff=0.9)
    near = near or difflib.get_close_matches(word, every, n=5, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"the built-in mappings are {', '.join(names())}"
