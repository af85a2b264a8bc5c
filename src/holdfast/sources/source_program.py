"""`SourceProgram`: the program of another tool's export, as its own plain data and as a Holdfast program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.program.model_program import Program


@dataclass(frozen=True, slots=True)
class SourceProgram:
    """A program as another tool wrote it.

    `operators` says how often each operator is used. `plain` is the program as frozen data, to look at. `refusal` is
    the reason why it has no Holdfast program, or empty.
    """

    format: str
    operators: Mapping[str, int]
    plain: Any
    translated: Program | None
    refusal: str = ""

    @property
    def program(self) -> Program:
        """The Holdfast program that computes the same; raises Unsupported, with the operators, if there is none."""
        if self.translated is None:
            raise Unsupported(self.refusal)
        return self.translated

    @property
    def note(self) -> str:
        """One sentence about the program."""
        if self.translated is None:
            return self.refusal
        count = sum(self.operators.values())
        return f"its program of {count} operators runs without the class: holdfast.load_program(path)"
