"""Decode attributes and types of a Paddle program: each is an object with the name of its kind and its value.

Numbers that JSON cannot say are under `VD` ("NaN", "INF", "-INF") instead of `D`. Paddle 3.2 writes them and cannot
read them. A null in the place of a number could be any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from holdfast.sources.paddle.pir.pir_program import UNKNOWN, Attribute, OpaqueAttribute, OpaqueType, PirTensor, PirType

DTYPES = {
    "bool": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "i8": "int8",
    "ui8": "uint8", "i16": "int16", "i32": "int32", "i64": "int64", "c64": "complex64", "c128": "complex128",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip
LIST_ITEMS = 1_000_000
TEXT_CHARS = 100_000
_SIZE_MAX = 2**48
_RANK = 64
_DEPTH = 16
_NULL = "a number that was saved as null: NaN or infinite, and the file does not say which"
_SPECIAL = {"NaN": math.nan, "INF": math.inf, "-INF": -math.inf}
_BITS = {"0.a_i32": 32, "0.a_i64": 64, "0.a_index": 64}
_FLOATS = frozenset({"0.a_f32", "0.a_f64"})
_TEXTS = frozenset({"0.a_str", "0.a_tensorname", "1.a_dtype", "1.a_layout"})
_COMPLEX = frozenset({"0.a_c64", "0.a_c128"})

Problem = Callable[[str], Exception]


def decode_attribute(data: Any, problem: Problem, depth: int = 0) -> Attribute:
    """Return the value of an attribute; raises `problem(text)` for what no Paddle writes."""
    if not isinstance(data, dict) or not isinstance(data.get("#"), str) or not {"D", "VD"} & set(data):
        raise problem("an attribute without a kind and a value")
    kind = data["#"]
    if "VD" in data:
        if kind not in _FLOATS or data["VD"] not in _SPECIAL or "D" in data:
            raise problem(f"an attribute of the kind {kind[:40]!r} with the value {str(data['VD'])[:40]!r}")
        return _SPECIAL[data["VD"]]
    value = data["D"]
    if kind == "0.a_bool":
        if not isinstance(value, bool):
            raise problem("an attribute that is neither true nor false")
        return value
    if kind in _FLOATS:
        return OpaqueAttribute(_NULL) if value is None else _float(value, problem)
    if kind in _BITS:
        return _integer(value, _BITS[kind], problem)
    if kind in _TEXTS:
        if not isinstance(value, str) or len(value) > TEXT_CHARS:
            raise problem(f"an attribute that is not a text of at most {TEXT_CHARS} characters")
        return value
    return _composed(kind, value, problem, depth)


def _composed(kind: str, value: Any, problem: Problem, depth: int) -> Attribute:
    """Return an attribute that is a list or a pair, or one of a kind that is not read."""
    if kind == "0.a_array":
        if depth > _DEPTH:
            raise problem(f"attributes nested deeper than {_DEPTH}")
        return tuple(decode_attribute(item, problem, depth + 1) for item in _items(value, problem))
    if kind == "1.a_intarray":
        return tuple(_integer(item, 64, problem) for item in _items(value, problem))
    if kind in _COMPLEX:
        parts = [_float(item, problem) for item in _items(value, problem)]
        if len(parts) != 2:
            raise problem("a complex number without two parts")
        return complex(*parts)
    if kind == "1.a_scalar":
        return _scalar(_items(value, problem), problem)
    return OpaqueAttribute(kind[:200])


def _scalar(value: list[Any], problem: Problem) -> Attribute:
    """Return a number that is stored with its dtype."""
    if len(value) < 2 or not isinstance(value[0], str):
        raise problem("a number without its dtype")
    dtype, *parts = value
    if len(parts) == 2 and dtype.startswith("complex"):
        return complex(*(_float(part, problem) for part in parts))
    if len(parts) != 1:
        raise problem(f"a number of the dtype {dtype[:40]!r} with {len(parts)} parts")
    if parts[0] is None:
        return OpaqueAttribute(_NULL)
    if dtype in ("float32", "float64"):
        return _float(parts[0], problem)
    if dtype == "bool" and isinstance(parts[0], bool | int):
        return bool(parts[0])
    if dtype in ("float16", "bfloat16"):  # stored as an integer whose meaning differs between versions
        return OpaqueAttribute(f"1.a_scalar of {dtype}")
    return _integer(parts[0], 64, problem)


def _items(value: Any, problem: Problem) -> list[Any]:
    if not isinstance(value, list) or len(value) > LIST_ITEMS:
        raise problem(f"an attribute that is not a list of at most {LIST_ITEMS}")
    return value


def _float(value: Any, problem: Problem) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise problem("an attribute that is not a number")
    try:
        return float(value)
    except OverflowError:
        raise problem("an attribute that is too large for a floating-point number") from None


def _integer(value: Any, bits: int, problem: Problem) -> int:
    if type(value) is not int or not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise problem(f"an attribute that is not an integer of {bits} bits")
    return value


def decode_type(data: Any, problem: Problem, depth: int = 0) -> PirType:
    """Return the type of a value: a tensor, a list of types, None, or another type by its name."""
    if not isinstance(data, dict) or not isinstance(data.get("#"), str):
        raise problem("a type without a kind")
    kind = data["#"]
    if kind == "NULL":
        return None
    if kind == "0.t_vec":
        if depth > _DEPTH:
            raise problem(f"types nested deeper than {_DEPTH}")
        return tuple(decode_type(item, problem, depth + 1) for item in _items(data.get("D"), problem))
    if kind != "0.t_dtensor":
        return OpaqueType(kind[:200])
    fields = _items(data.get("D"), problem)
    if len(fields) < 2 or not isinstance(fields[0], dict) or not isinstance(fields[0].get("#"), str):
        raise problem("a tensor without a dtype and a shape")
    code = fields[0]["#"].removeprefix("0.t_")
    if code not in DTYPES:
        return OpaqueType(f"a tensor of {fields[0]['#'][:40]}")
    return PirTensor(DTYPES[code], _shape(fields[1], problem))


def _shape(dims: Any, problem: Problem) -> tuple[int, ...]:
    if not isinstance(dims, list) or len(dims) > _RANK:
        raise problem(f"a shape that is not a list of at most {_RANK} sizes")
    if not all(type(size) is int and -_SIZE_MAX < size < _SIZE_MAX for size in dims):
        raise problem(f"a shape with an invalid size: {str(dims)[:80]}")
    return tuple(max(size, UNKNOWN) for size in dims)  # Paddle multiplies unknown sizes: -24 is unknown, too
