"""The words of the matrix: an operation, its inputs as letters, and the sizes that letters stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# h and w are images, l and s are sequences, c is channels and classes, t is a head count or a second batch
SIZES: dict[str, dict[str, int]] = {
    "even": {"n": 8, "m": 4, "c": 8, "k": 4, "h": 8, "w": 8, "l": 8, "t": 4, "o": 8, "v": 16, "1": 1, "2": 2, "6": 6},
    "uneven": {"n": 7, "m": 5, "c": 6, "k": 5, "h": 9, "w": 7, "l": 6, "t": 5, "o": 6, "v": 13, "1": 1, "2": 2, "6": 6},
    "few": {"n": 3, "m": 2, "c": 2, "k": 2, "h": 5, "w": 6, "l": 3, "t": 2, "o": 2, "v": 6, "1": 1, "2": 2, "6": 6},
}


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor argument: what its values are, and a letter for each dim."""

    letters: str
    kind: str = "normal"  # or positive, unit, small, ties, spd, bool, int; without gradient: constant, variance;
    # not DTensors: plainint, plainbool
    below: str = ""  # the letter whose size bounds the values of integers

    @classmethod
    def parse(cls, text: str) -> Input:
        kind, _, rest = text.rpartition(":")
        letters, _, below = rest.partition("<")
        return cls(letters, kind or "normal", below)

    @property
    def is_float(self) -> bool:
        return self.kind in ("normal", "positive", "unit", "small", "ties", "spd", "constant", "variance")

    @property
    def is_plain(self) -> bool:
        return self.kind.startswith("plain")

    def make(self, size: str, generator: torch.Generator) -> torch.Tensor:
        shape = [SIZES[size][letter] for letter in self.letters]
        draw = torch.randn(shape, generator=generator, dtype=torch.float64)
        match self.kind.removeprefix("plain"):
            case "normal" | "constant":
                return draw
            case "positive" | "variance":
                return draw.abs() + 0.5
            case "unit":
                return torch.sigmoid(draw) * 0.9 + 0.05
            case "small":
                return draw * 0.1
            case "ties":
                return draw.mul(1.5).round()
            case "spd":
                return draw @ draw.mT + 3 * torch.eye(shape[-1], dtype=torch.float64)
            case "bool":
                return draw > 0
            case "int":
                high = SIZES[size][self.below] if self.below else 10
                return torch.randint(0, high, shape, generator=generator)
        raise ValueError(f"no such kind of values: {self.kind}")


@dataclass(frozen=True, slots=True)
class Operation:
    """A call to try: its name, its inputs, and where sharded work needs no communication at all."""

    family: str
    name: str
    call: Callable[..., Any]
    inputs: tuple[Input, ...]
    free: str = ""  # letters whose shards need not talk, forward or backward
    reduced: dict[str, str] = field(
        default_factory=dict
    )  # letters whose shards reduce so much: {"n": "4c"}, 4 x c numbers
    grad: bool = True
    partial: bool = True
    random: bool = False
    tolerance: float = 1e-8


class Table:
    """Collects the operations of one family."""

    def __init__(self, family: str):
        self.family = family
        self.operations: list[Operation] = []

    def add(self, name: str, call: Callable[..., Any], *inputs: str, **options: Any) -> None:
        parsed = tuple(Input.parse(text) for text in inputs)
        self.operations.append(Operation(self.family, name, call, parsed, **options))
