"""Built-in mappings: from the hub's naming of a family to others, by name or found from config.json.

A name is `<family>-<variant>`, as in `llama-fused`; `<family>-from-<variant>` is the way back. A variant
alone (`fused`, `from-megatron`) belongs to the family that the model's config.json tells.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.families.deepseek_v3 import DEEPSEEK_V3
from holdfast.mapping.families.family import Family
from holdfast.mapping.families.gpt2 import GPT2
from holdfast.mapping.families.llama import LLAMA
from holdfast.mapping.families.mixtral import MIXTRAL
from holdfast.mapping.families.qwen2 import QWEN2
from holdfast.mapping.families.qwen3 import QWEN3
from holdfast.mapping.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "Family", "Program", "find", "is_back", "is_name", "named", "names", "nearest"]

FAMILIES = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3, GPT2)
_BACK = "from-"


@dataclass(frozen=True, slots=True)
class Program:
    """A program by its name: the text from the hub's naming on, and whether it is to be reversed.

    `renames` are other names for pieces of its targets, which the reverse takes as well.
    """

    name: str
    text: str
    reversed: bool
    renames: Mapping[str, str] = field(default_factory=dict)


def names() -> tuple[str, ...]:
    """The names of all built-in mappings; `from-` before the variant reverses each."""
    return tuple(f"{family.name}-{variant}" for family in FAMILIES for variant in family.programs)


def is_name(name: str) -> bool:
    """Whether a built-in mapping is called that, with its family or without."""
    family, variant = _split(name.replace("_", "-"))
    return any(variant in each.programs for each in ((family,) if family else FAMILIES))


def find(config: Mapping[str, Any]) -> Family:
    """The family of a model, by the model_type or architectures of its config.json."""
    model_type, architectures = config.get("model_type"), config.get("architectures") or ()
    for family in FAMILIES:
        if model_type in family.model_types or any(name in family.architectures for name in architectures):
            return family
    known = ", ".join(kind for family in FAMILIES for kind in family.model_types)
    raise InvalidArgument(
        f"config.json says model_type {model_type!r}, which is no family with built-in mappings ({known}); "
        "write the mapping as statements"
    )


def named(name: str, config: Mapping[str, Any] | None = None, keys: Iterable[str] | None = None) -> Program:
    """The built-in mapping of that name.

    `config` is the model's config.json, for the numbers that some programs need and for names without a
    family. `keys` are those of the hub's naming, where known: they tell whether the model has its prefix.
    Raises InvalidArgument for an unknown name, and for a config without a needed number.
    """
    word = name.replace("_", "-")
    family, variant = _split(word)
    if family is None:
        if not is_name(name):
            raise InvalidArgument(f"no built-in mapping is called {name!r}; {nearest(name)}")
        if config is None:
            raise InvalidArgument(
                f"the mapping {name!r} needs a config.json to find the family; "
                f"name it: {', '.join(f'{each.name}-{word}' for each in FAMILIES if variant in each.programs)}"
            )
        family = find(config)
    return Program(name, family.program(variant, config, keys), is_back(name), family.renames)


def _split(word: str) -> tuple[Family | None, str]:
    """The family that a name begins with, if any, and the variant that follows."""
    for family in sorted(FAMILIES, key=lambda family: -len(family.name)):
        if word.startswith(f"{family.name}-"):
            return family, word.removeprefix(f"{family.name}-").removeprefix(_BACK)
    return None, word.removeprefix(_BACK)


def is_back(name: str) -> bool:
    """Whether the mapping of that name leads to the hub's naming, not from it."""
    word = name.replace("_", "-")
    family, _ = _split(word)
    return (word if family is None else word.removeprefix(f"{family.name}-")).startswith(_BACK)


def nearest(word: str) -> str:
    """The built-in names that a word may be a misspelling of, as a hint."""
    every = [*names(), *sorted({variant for family in FAMILIES for variant in family.programs})]
    near = difflib.get_close_matches(word, every, n=5, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(names())}"
