"""What a rule is, and the list of all of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.spmd.call import Run


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
    """Every rule, from every file of rules/ and handlers/."""
    for package in ("rules", "handlers"):
        folder = importlib.import_module(f"holdfast.spmd.{package}")
        for module in sorted(pkgutil.iter_modules(folder.__path__), key=lambda module: module.name):
            yield from importlib.import_module(f"{folder.__name__}.{module.name}").RULES
