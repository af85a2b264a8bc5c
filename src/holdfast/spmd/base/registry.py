"""The type `Rule`, and the list of all rules, from the `RULES` of every module under rules/."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.spmd.base.call import Run


@dataclass(frozen=True, slots=True)
class Rule:
    """How to run some operators on shards, and why torch's own rule is not enough."""

    family: str
    operators: tuple[str, ...]
    placements: str  # the dims that may stay sharded, in words
    why: str
    run: Run
    # torch 2.13 is right for even shards without Partials if nothing is redistributed
    torch_handles_even: bool = False


def all_rules() -> Iterator[Rule]:
    """Yield every rule, from the `RULES` of every module under rules/."""
    for name in _modules():
        yield from getattr(importlib.import_module(name), "RULES", ())


@functools.cache
def _modules() -> tuple[str, ...]:
    folder = importlib.import_module("holdfast.spmd.rules")
    return tuple(sorted(module.name for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")))
