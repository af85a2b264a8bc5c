"""Arguments of operators as frozen values, and their strict JSON: numbers, texts, lists, references, dtypes, devices.

JSON has what it can say by itself; the rest is an object with one key, named as in state.json: `$` (the value of a
node, an input or a weight), `$float` (nan, inf, -inf), `$complex`, `$dtype`, `$device` (the type without a number),
`$layout`, `$format` (a memory format), `$slice`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.format.dtypes import is_dtype
from holdfast.program import program_limits as most

LAYOUTS = frozenset({"strided"})
FORMATS = frozenset({"contiguous_format", "channels_last", "channels_last_3d", "preserve_format"})
DEVICES = frozenset({"cpu", "cuda", "meta", "mps", "xpu", "hpu", "npu", "xla", "model"})
MODEL_DEVICE = "model"  # where the weights are when the program runs

Problem = Callable[[str], Exception]


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of a node, an input or a weight, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class DtypeValue:
    name: str


@dataclass(frozen=True, slots=True)
class DeviceValue:
    """A device type, or "model" for the device of the weights. Numbers of cards are not stored."""

    kind: str


@dataclass(frozen=True, slots=True)
class LayoutValue:
    name: str


@dataclass(frozen=True, slots=True)
class FormatValue:
    """A memory format."""

    name: str


@dataclass(frozen=True, slots=True)
class SliceValue:
    start: Any
    stop: Any
    step: Any


Value = (
    None
    | bool
    | int
    | float
    | complex
    | str
    | Ref
    | DtypeValue
    | DeviceValue
    | LayoutValue
    | FormatValue
    | SliceValue
    | tuple["Value", ...]
)


def references(value: Value) -> Iterator[str]:
    """Yield the names that a value refers to."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, tuple):
        for item in value:
            yield from references(item)
    elif isinstance(value, SliceValue):
        yield from references((value.start, value.stop, value.step))


def encode_value(value: Value) -> Any:
    """Return a value as JSON data."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [encode_value(item) for item in value]
    if isinstance(value, Ref):
        return {"$": value.name}
    if isinstance(value, complex):
        return {"$complex": [encode_value(value.real), encode_value(value.imag)]}
    if isinstance(value, DtypeValue):
        return {"$dtype": value.name}
    if isinstance(value, DeviceValue):
        return {"$device": value.kind}
    if isinstance(value, LayoutValue):
        return {"$layout": value.name}
    if isinstance(value, FormatValue):
        return {"$format": value.name}
    return {"$slice": [encode_value(part) for part in (value.start, value.stop, value.step)]}


def decode_value(data: Any, problem: Problem, depth: int = 0) -> Value:
    """Return the value of JSON data; raises `problem(text)` for what no value looks like."""
    if data is None or isinstance(data, bool | float):
        return data
    if isinstance(data, int):
        return _whole(data, problem)
    if isinstance(data, str):
        if len(data) > most.TEXT_CHARS:
            raise problem(f"a text of {len(data)} characters, more than the limit of {most.TEXT_CHARS}")
        return data
    if depth >= most.VALUE_DEPTH:
        raise problem(f"lists nested deeper than {most.VALUE_DEPTH}")
    if isinstance(data, list):
        if len(data) > most.LIST_ITEMS:
            raise problem(f"a list of {len(data)} items, more than the limit of {most.LIST_ITEMS}")
        return tuple(decode_value(item, problem, depth + 1) for item in data)
    return _tagged(data, problem, depth)


def _whole(number: int, problem: Problem) -> int:
    if not -most.SIZE_MAX - 1 <= number <= most.SIZE_MAX:
        raise problem("an integer that has more than 64 bits")
    return number


def _tagged(data: Any, problem: Problem, depth: int) -> Value:
    if not isinstance(data, dict) or len(data) != 1:
        raise problem("an object that is not a value: a value has exactly one key, such as $dtype")
    tag, content = next(iter(data.items()))
    if tag == "$complex":
        real, imaginary = (_real(part, problem) for part in _items(content, 2, problem))
        return complex(real, imaginary)
    if tag == "$slice":
        start, stop, step = (decode_value(part, problem, depth + 1) for part in _items(content, 3, problem))
        if not all(part is None or type(part) is int or isinstance(part, Ref) for part in (start, stop, step)):
            raise problem("a slice of other things than integers")
        return SliceValue(start, stop, step)
    if not isinstance(content, str):
        raise problem(f"the value {str(tag)[:40]!r} holds no text")
    return _named(tag, content, problem)


def _named(tag: str, content: str, problem: Problem) -> Value:
    if tag == "$":
        return Ref(content)
    if tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if tag == "$dtype" and is_dtype(content):
        return DtypeValue(content)
    if tag == "$device" and content in DEVICES:
        return DeviceValue(content)
    if tag == "$layout" and content in LAYOUTS:
        return LayoutValue(content)
    if tag == "$format" and content in FORMATS:
        return FormatValue(content)
    raise problem(f"the unknown value {{{tag[:40]!r}: {content[:40]!r}}}")


def _items(content: Any, count: int, problem: Problem) -> list[Any]:
    if not isinstance(content, list) or len(content) != count:
        raise problem(f"a value that is not a list of {count}")
    return content


def _real(data: Any, problem: Problem) -> float:
    value = decode_value(data, problem, most.VALUE_DEPTH - 1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise problem("a complex number with a part that is not a number")
    return float(value)
