"""What a rule is, and the list of all of them."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.spmd.base.call import Run


@dataclass(frozen=True, slots=True)
class Rule:
    """How some operators run on shards, and why torch's own way does not do."""

    family: str
    operators: tuple[str, ...]
    placements: str  # what may stay sharded, in words
    why: str
    run: Run
    spares_even: bool = False  # whether torch 2.13 is right where shards are even, none is a sum, and nothing moves


def all_rules() -> Iterator[Rule]:
    """Yield every rule, from the `RULES` of every module under rules/."""
    for name in _modules():
        yield from getattr(importlib.import_module(name), "RULES", ())


@functools.cache
def _modules() -> tuple[str, ...]:
    folder = importlib.import_module("holdfast.spmd.rules")
    return tuple(sorted(module.name for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")))
