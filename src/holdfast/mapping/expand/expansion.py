"""What expanding a program comes to: statements for given keys."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.mapping.syntax.statement import Statement


@dataclass(frozen=True, slots=True)
class Step:
    """One statement for one combination of ids: names without holes. Marks of `^T` go along."""

    lefts: tuple[str, ...]
    rights: tuple[str, ...]
    left_turned: tuple[bool, ...] = ()
    right_turned: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Expansion:
    """A statement and its steps, which happen at once: all read before any makes a name."""

    statement: Statement
    steps: tuple[Step, ...]
