"""Strict JSON text: parsing with bounded size and depth, no duplicate keys, no NaN; compact, stable encoding."""

from __future__ import annotations

import json
import math
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged


class _Duplicate(ValueError):
    pass


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return out


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def loads(data: bytes, where: str, *, limit_bytes: int = limits.JSON_BYTES) -> Any:
    """Parse strict JSON; every failure raises Damaged and names `where`."""
    problem = size_problem(data, limit_bytes)
    if problem:
        raise Damaged(f"{where}: {problem}")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_finite)
        if b"\\u" in data:
            dumps(value)  # refuses half of a surrogate pair, which could not be written again
    except RecursionError:
        raise Damaged(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise Damaged(f"{where}: not valid JSON: {error}") from None
    if _containers(data) > limits.JSON_DEPTH:  # fewer containers cannot be nested deeper
        _check_depth(value, where)
    return value


def size_problem(data: bytes, limit_bytes: int = limits.JSON_BYTES) -> str | None:
    """Return why JSON is too large to read, or None; writers check too, so that output can be read."""
    if len(data) > limit_bytes:
        return f"{len(data)} bytes of JSON, more than the limit of {limit_bytes}"
    # An empty list takes 2 bytes of text and 64 of memory.
    containers = _containers(data)
    if containers > limits.JSON_CONTAINERS:
        return f"{containers} lists and objects of JSON, more than the limit of {limits.JSON_CONTAINERS}"
    return None


def _containers(data: bytes) -> int:
    """Return an upper bound on the number of lists and objects."""
    return data.count(b"[") + data.count(b"{")


def _check_depth(value: Any, where: str) -> None:
    """Refuse deep nesting, since later readers recurse into the value."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(limits.JSON_DEPTH):
        if not level:
            return
        level = [
            inner
            for item in level
            for inner in (item.values() if type(item) is dict else item)
            if type(inner) is dict or type(inner) is list
        ]
    raise Damaged(f"{where}: JSON nested deeper than {limits.JSON_DEPTH}")


def dumps(value: Any) -> bytes:
    """Encode compact JSON that depends only on the value; keys keep their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
