"""Checks of the inputs of a run: dtypes, shapes, ranges of sizes, and the guards of the export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.core.errors import Mismatch
from holdfast.program.graph import InputEntry, ProgramData, ScalarType, TensorType
from holdfast.program.sizes import Size, SizeProblem, evaluate, size_text, solve, symbols_of


class InputChecks:
    """Checks the leaves of the inputs of one program."""

    def __init__(self, program: ProgramData) -> None:
        self._program = program
        self._specialized = {(size.input, size.dim) for size in program.specialized}
        bound = {symbol for entry in program.inputs for size in _sizes(entry) for symbol in symbols_of(size)}
        self._guards = [guard for guard in program.guards if set(symbols_of(guard)) <= bound]
        self._ranges = [(name, *program.symbols[name]) for name in program.symbols if name in bound]

    def check(self, leaves: Sequence[Any], where: str) -> None:
        """Raise Mismatch, by the name of the input, unless the program can run on these values."""
        values: dict[str, int] = {}
        later: list[tuple[str, Size, int]] = []
        for entry, value in zip(self._program.inputs, leaves, strict=True):
            for place, expected, found in self._expected(entry, value, where):
                if isinstance(expected, str) and expected not in values:
                    values[expected] = found
                else:
                    later.append((place, expected, found))
        self._check_sizes(later, values, where)
        for name, least, largest in self._ranges:
            if name in values and not (least <= values[name] and (largest is None or values[name] <= largest)):
                bounds = f"at least {least}" if largest is None else f"between {least} and {largest}"
                raise Mismatch(f"{where}: the size {name} is {values[name]}, but the program was exported for {bounds}")
        for guard in self._guards:
            if not _holds(guard, values):
                given = ", ".join(f"{name} = {values.get(name)}" for name in dict.fromkeys(symbols_of(guard)))
                raise Mismatch(f"{where}: the program was exported for sizes with {size_text(guard)}; here {given}")

    def _expected(self, entry: InputEntry, value: Any, where: str) -> list[tuple[str, Size, int]]:
        """Return the sizes of an input with the sizes found; raises Mismatch for another kind of value."""
        kind = entry.type
        if kind is None:
            if type(value) is not type(entry.value) or repr(value) != repr(entry.value):
                raise Mismatch(f"{where}: {entry.name} was {entry.value!r} at export and is a constant; here {value!r}")
            return []
        if isinstance(kind, ScalarType):
            if type(value) is not int:
                raise Mismatch(f"{where}: {entry.name} is {type(value).__name__}, not an integer")
            return [] if kind.size is None else [(entry.name, kind.size, value)]
        if not isinstance(kind, TensorType) or not isinstance(value, torch.Tensor):
            raise Mismatch(f"{where}: {entry.name} is a {type(value).__name__}, not a tensor")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype != kind.dtype:
            raise Mismatch(f"{where}: {entry.name} is {dtype}, but the program was exported for {kind.dtype}")
        if len(value.shape) != len(kind.shape):
            raise Mismatch(
                f"{where}: {entry.name} has the shape {list(value.shape)}, but the program was exported for "
                f"{len(kind.shape)} dims: [{', '.join(map(size_text, kind.shape))}]"
            )
        return [(f"dim {dim} of {entry.name}", size, value.shape[dim]) for dim, size in enumerate(kind.shape)]

    def _check_sizes(self, later: list[tuple[str, Size, int]], values: dict[str, int], where: str) -> None:
        for place, expected, found in later:
            try:
                solved = solve(expected, found, values)
                if solved is not None:
                    values[solved[0]] = solved[1]
                needed = evaluate(expected, values)
            except SizeProblem as problem:
                raise Mismatch(f"{where}: {place} is {found}: {problem}") from None
            if needed != found:
                raise Mismatch(f"{where}: {place} is {found}, {self._reason(place, expected, needed)}")

    def _reason(self, place: str, expected: Size, needed: int) -> str:
        if isinstance(expected, int):
            was_dynamic = any(place == f"dim {dim} of {name}" for name, dim in self._specialized)
            declared = ", although it was declared dynamic" if was_dynamic else ""
            return f"but it was {needed} at export and is a constant{declared}; export with dynamic_shapes to change it"
        return f"but {size_text(expected)} is {needed}"


def _sizes(entry: InputEntry) -> list[Size]:
    if isinstance(entry.type, TensorType):
        return list(entry.type.shape)
    return [entry.type.size] if isinstance(entry.type, ScalarType) and entry.type.size is not None else []


def _holds(guard: Size, values: dict[str, int]) -> bool:
    try:
        return bool(evaluate(guard, values))
    except SizeProblem:
        return False
