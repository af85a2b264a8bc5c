"""Types of an expanded program: a statement, and its steps for concrete keys."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.mapping.syntax.statement import Statement


@dataclass(frozen=True, slots=True)
class ExpandedStep:
    """One statement for one combination of ids: concrete names with their `^T` marks."""

    lefts: tuple[str, ...]
    rights: tuple[str, ...]
    left_transposed: tuple[bool, ...] = ()
    right_transposed: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Expansion:
    """A statement and its steps. Steps run at once: all read before any of them defines a name."""

    statement: Statement
    steps: tuple[ExpandedStep, ...]
