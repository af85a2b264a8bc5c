"""Sizes and guards as trees: integers, symbols and operations on them, evaluated without any text being parsed.

A size is an integer, the name of a symbol, or `[operation, term, ...]`: add, sub, mul, floordiv, mod, min, max, pow
and where. A condition is a size whose operation compares or joins: eq, ne, lt, le, gt, ge, and, or, not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from holdfast.program import program_limits as most
from holdfast.program.arguments import Problem


@dataclass(frozen=True, slots=True)
class SizeOperation:
    """An operation on sizes: its name and its terms."""

    name: str
    terms: tuple[Size, ...]


Size = int | str | SizeOperation


class SizeProblem(ValueError):
    """A size that has no value: a division by zero, an unknown symbol, a number that is too large."""


def _fold(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *terms: reduce(combine, terms)


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= 64:
        raise SizeProblem(f"the exponent {exponent} is not between 0 and 64")
    return int(base**exponent)


_MANY = most.SIZE_NODES
# By name: the least and the largest number of terms, and the function. Conditions come second.
_ARITHMETIC: dict[str, tuple[int, int, Callable[..., Any]]] = {
    "add": (2, _MANY, _fold(operator.add)),
    "sub": (2, 2, operator.sub),
    "mul": (2, _MANY, _fold(operator.mul)),
    "floordiv": (2, 2, operator.floordiv),
    "mod": (2, 2, operator.mod),
    "pow": (2, 2, _power),
    "min": (2, _MANY, min),
    "max": (2, _MANY, max),
}
_CONDITIONS: dict[str, tuple[int, int, Callable[..., Any]]] = {
    "eq": (2, 2, operator.eq),
    "ne": (2, 2, operator.ne),
    "lt": (2, 2, operator.lt),
    "le": (2, 2, operator.le),
    "gt": (2, 2, operator.gt),
    "ge": (2, 2, operator.ge),
    "and": (1, _MANY, lambda *terms: all(terms)),
    "or": (1, _MANY, lambda *terms: any(terms)),
    "not": (1, 1, operator.not_),
}
_ALL = {**_ARITHMETIC, **_CONDITIONS, "where": (3, 3, lambda condition, yes, no: yes if condition else no)}
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "pow": "**", "eq": "==", "ne": "!="} | {
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "and",
    "or": "or",
}


def is_condition(size: Size) -> bool:
    return isinstance(size, SizeOperation) and size.name in _CONDITIONS


def symbols_of(size: Size) -> Iterator[str]:
    """Yield the symbols of a size, in order, some more than once."""
    if isinstance(size, str):
        yield size
    elif isinstance(size, SizeOperation):
        for term in size.terms:
            yield from symbols_of(term)


def evaluate(size: Size, values: Mapping[str, int]) -> int:
    """Return the value of a size, or the truth of a condition; raises SizeProblem if it has none."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        if size not in values:
            raise SizeProblem(f"no input gives the size {size}")
        return values[size]
    terms = [evaluate(term, values) for term in size.terms]
    try:
        result = _ALL[size.name][2](*terms)
    except ZeroDivisionError:
        raise SizeProblem(f"{size_text(size)} divides by zero") from None
    if not -most.SIZE_MAX <= result <= most.SIZE_MAX:
        raise SizeProblem(f"{size_text(size)} is larger than 64 bits")
    return int(result)


def solve(size: Size, target: int, values: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the one unknown symbol of a size and its value, if the size is linear in it and equals `target`."""
    unknown = sorted({symbol for symbol in symbols_of(size) if symbol not in values})
    if len(unknown) != 1:
        return None
    at_zero, at_one = (evaluate(size, {**values, unknown[0]: number}) for number in (0, 1))
    slope = at_one - at_zero
    if slope == 0 or (target - at_zero) % slope:
        return None
    found = (target - at_zero) // slope
    return (unknown[0], found) if evaluate(size, {**values, unknown[0]: found}) == target else None


def size_text(size: Size) -> str:
    """Return a size as people write it."""
    if not isinstance(size, SizeOperation):
        return str(size)
    terms = [f"({size_text(term)})" if isinstance(term, SizeOperation) else str(term) for term in size.terms]
    if size.name in _SIGNS and len(terms) > 1:
        return f" {_SIGNS[size.name]} ".join(terms)
    return f"{size.name}({', '.join(terms)})"


def encode_size(size: Size) -> Any:
    """Return a size as JSON data."""
    if isinstance(size, SizeOperation):
        return [size.name, *(encode_size(term) for term in size.terms)]
    return size


def decode_size(data: Any, problem: Problem) -> Size:
    """Return the size of JSON data; raises `problem(text)` for another thing. Its symbols are not checked."""
    return _SizeReader(problem).size(data, 0)


class _SizeReader:
    """Decodes one size, and counts its terms."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._terms = 0

    def size(self, data: Any, depth: int) -> Size:
        self._terms += 1
        if depth > most.SIZE_DEPTH or self._terms > most.SIZE_NODES:
            raise self._problem(f"a size of more than {most.SIZE_NODES} terms or {most.SIZE_DEPTH} levels")
        if type(data) is int:
            if not -most.SIZE_MAX <= data <= most.SIZE_MAX:
                raise self._problem("a size of more than 64 bits")
            return data
        if isinstance(data, str):
            return data
        if not isinstance(data, list) or not data or not isinstance(data[0], str) or data[0] not in _ALL:
            name = data[0] if isinstance(data, list) and data else data
            raise self._problem(f"{str(name)[:40]!r} is not an operation on sizes")
        least, largest, _ = _ALL[data[0]]
        if not least <= len(data) - 1 <= largest:
            raise self._problem(f"the operation {data[0]} on {len(data) - 1} sizes")
        return SizeOperation(data[0], tuple(self.size(term, depth + 1) for term in data[1:]))
