"""Options of a statement from their tokens: names, lists, dtypes, and errors for unknown or repeated ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.format.dtypes import DType, dtype_named, is_dtype
from holdfast.mapping.syntax import guess
from holdfast.mapping.syntax.statement import Options
from holdfast.mapping.syntax.tokens import Token

Value = Token | list[int] | None
MakeError = Callable[[Token, str], InvalidArgument]

_COUNTS = ("parts", "num_heads", "num_key_value_groups", "tp_degree", "src_tp_degree", "dst_tp_degree")
_DTYPES = ("dtype", "src_dtype", "dst_dtype")
_SHAPES = ("reshape", "src_shape")
_INTEGER = re.compile(r"-?[0-9]{1,9}")
_LIST = re.compile(r"\[\s*(?:[0-9]{1,9}\s*(?:,\s*[0-9]{1,9}\s*)*)?\]")
_DTYPE_EXAMPLES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "int8", "int64")


def options_of(written: Iterable[tuple[Token, str, Value]], make_error: MakeError) -> Options:
    """Build the options. Raises the error from `make_error` for an option that is unknown, repeated or malformed."""
    found: dict[str, Any] = {}
    for token, name, value in written:
        field = "fused" if name.startswith("fused_") else name
        if field in found:
            raise make_error(
                token, f"{name} appears twice" if field == name else "a statement can have only one fused form"
            )
        found[field] = _value(token, name, value, make_error)
    return Options(**found)


def _value(token: Token, name: str, value: Value, make_error: MakeError) -> object:
    if value is None:
        return name if name.startswith("fused_") else True
    if name == "sizes":
        if isinstance(value, Token) and value.bare in ("equal", "targets", "any"):
            return value.bare
        return tuple(_list(token, name, value, make_error))
    if name in _SHAPES:
        if name == "reshape" and isinstance(value, Token) and value.bare == "targets":
            return value.bare
        return tuple(_list(token, name, value, make_error))
    if name == "permute":
        order = tuple(_list(token, name, value, make_error))
        if sorted(order) != list(range(len(order))):
            raise make_error(
                token, f"permute={list(order)} is not a permutation of the dims 0 to {max(len(order) - 1, 0)}"
            )
        return order
    if isinstance(value, list):
        raise make_error(token, f"{name} takes one value, not a list")
    if name in _DTYPES:
        return _dtype(value, name, make_error)
    if value.bare is None or not _INTEGER.fullmatch(value.bare):
        raise make_error(value, f"{name}={value.shown} is not an integer{guess.missing_separator(value.text)}")
    number = int(value.bare)
    if name != "axis" and number < 1:
        raise make_error(value, f"{name}={number} is not positive")
    return number


def _list(token: Token, name: str, value: Token | list[int], make_error: MakeError) -> list[int]:
    """Return a list of numbers, written as a list or, in AOA, as text."""
    if isinstance(value, list):
        return value
    text = value.text
    if value.bare is not None or not _LIST.fullmatch(text.strip()):
        raise make_error(token, f"{name}={value.shown} is not a list of integers such as [2, 0, 1]")
    return [int(number) for number in re.findall("[0-9]+", text)]


def _dtype(value: Token, name: str, make_error: MakeError) -> DType:
    text = value.text
    if not is_dtype(text):
        near = difflib.get_close_matches(text, _DTYPE_EXAMPLES, 2, 0.5) or list(_DTYPE_EXAMPLES[:3])
        first = value.pieces[0].text
        joined = f"; is a comma or a new line missing after {first!r}?" if text != first and is_dtype(first) else ""
        raise make_error(
            value,
            f"{name}={value.shown!r} is not a dtype; write dtypes in full, such as {' or '.join(near)}{joined}",
        )
    dtype = dtype_named(text)
    if dtype.name != dtype.stored:
        raise make_error(value, f"{name}={text!r}: elements cannot be cast to a dtype stored as {dtype.stored}")
    return dtype
