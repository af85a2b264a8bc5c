"""Schemas of operators, read from torch's text: the types, names and defaults of arguments, and what is returned.

A text is read strictly, since torch's own parser gets it next: nested brackets make that one overflow the stack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from holdfast.program.arguments import (
    DeviceValue,
    DtypeValue,
    FormatValue,
    LayoutValue,
    Ref,
    SliceValue,
    Value,
)

_HEAD = re.compile(r"aten::(?P<name>\w+)(?:\.(?P<overload>\w+))?\((?P<rest>.*)", re.ASCII | re.DOTALL)
_ALIAS = re.compile(r"\([A-Za-z*!| >-]{1,20}\)")
_TYPE = re.compile(r"(?P<base>[A-Za-z]+)(?P<first>\?)?(?P<list>\[\d{0,3}\])?(?P<optional>\?)?", re.ASCII)
_NUMBER = r"-?[0-9]{1,19}(?:\.[0-9]{0,20})?(?:e[+-]?[0-9]{1,3})?"
_DEFAULT = re.compile(rf'{_NUMBER}|\[(?:{_NUMBER}(?:, {_NUMBER})*)?\]|None|True|False|"[\w ,.()-]*"', re.ASCII)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class SchemaProblem(ValueError):
    """A text that is not the schema of an operator, or arguments that do not fit it."""


@dataclass(frozen=True, slots=True)
class ArgumentType:
    """`base` is "Tensor", "int", ...; a list of them, or possibly missing."""

    base: str
    is_list: bool = False
    is_optional: bool = False
    has_optional_items: bool = False

    @staticmethod
    def parse(text: str) -> ArgumentType:
        """Read a type such as "Tensor(a!)?[]" or "SymInt[2]"."""
        match = _TYPE.fullmatch(_ALIAS.sub("", text))
        if match is None:
            raise SchemaProblem(f"{text[:80]!r} is not a type")
        is_list = match["list"] is not None
        first, last = match["first"] is not None, match["optional"] is not None
        return ArgumentType(match["base"], is_list, last or (first and not is_list), first and is_list)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its type and name, and whether it has a default or is passed by name only."""

    type: ArgumentType
    name: str
    has_default: bool
    keyword_only: bool


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of one overload. `op` is its name in a program, such as "aten.add.Tensor"."""

    op: str
    arguments: tuple[Argument, ...]
    returns: tuple[ArgumentType, ...]

    def check(self, args: tuple[Value, ...], kwargs: dict[str, Value]) -> None:
        """Raise SchemaProblem unless the arguments fit: their number, names and kinds."""
        positional = [argument for argument in self.arguments if not argument.keyword_only]
        if len(args) > len(positional):
            raise SchemaProblem(f"takes {len(positional)} positional arguments, not {len(args)}")
        given = dict(zip((argument.name for argument in positional), args, strict=False))
        twice = [name for name in kwargs if name in given]
        if twice:
            raise SchemaProblem(f"gets the argument {twice[0]!r} twice")
        given |= kwargs
        for argument in self.arguments:
            if argument.name not in given:
                if not argument.has_default:
                    raise SchemaProblem(f"lacks the argument {argument.name!r}")
            elif not _fits(given.pop(argument.name), argument.type):
                raise SchemaProblem(f"takes {_type_text(argument.type)} as {argument.name!r}")
        if given:
            raise SchemaProblem(f"has no argument {min(given)[:80]!r}")


@lru_cache(maxsize=4096)
def parse_schema(text: str) -> Schema:
    """Read the text of a schema; raises SchemaProblem for another text."""
    match = _HEAD.fullmatch(text)
    if match is None or not text.isascii():
        raise SchemaProblem(f"{text[:80]!r} is not the schema of an aten operator")
    inside, end = _until_closing(match["rest"])
    returned = end.removeprefix(" -> ")
    if returned == end:
        raise SchemaProblem(f"{text[:80]!r} does not say what it returns")
    if returned.startswith("("):
        returned, rest = _until_closing(returned[1:])
        if rest:
            raise SchemaProblem(f"{rest[:80]!r} follows what it returns")
    arguments, keyword_only = [], False
    for part in _split(inside):
        if part == "*":
            keyword_only = True
        else:
            arguments.append(_argument(part, keyword_only))
    returns = tuple(map(_returned_type, _split(returned)))
    return Schema(f"aten.{match['name']}.{match['overload'] or 'default'}", tuple(arguments), returns)


def _argument(text: str, keyword_only: bool) -> Argument:
    declared, equals, default = text.partition("=")
    kind, _, name = declared.rpartition(" ")
    if not name.isidentifier() or (equals and not _DEFAULT.fullmatch(default)):
        raise SchemaProblem(f"{text[:80]!r} is not an argument")
    return Argument(ArgumentType.parse(kind), name, bool(equals), keyword_only)


def _returned_type(text: str) -> ArgumentType:
    kind, space, name = text.rpartition(" ")
    return ArgumentType.parse(kind if space and name.isidentifier() else text)


def _until_closing(text: str) -> tuple[str, str]:
    """Split after an opening bracket at its closing one."""
    for position in _outside(text, ")"):
        return text[:position], text[position + 1 :]
    raise SchemaProblem(f"a bracket is not closed in {text[:80]!r}")


def _split(text: str) -> Iterator[str]:
    """Yield the parts between commas that are in no bracket or text."""
    begin = 0
    for position in _outside(text, ","):
        yield text[begin:position].strip()
        begin = position + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _outside(text: str, wanted: str) -> Iterator[int]:
    """Yield where a character is in no bracket and in no quoted text."""
    closing: list[str] = []
    quote = ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif not closing and character == wanted:
            yield position
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
        elif closing and character == closing[-1]:
            closing.pop()


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: Value) -> bool:
    return type(value) is int


# What may stand for an argument, beside the value of a node that computes it.
_KINDS: dict[str, Callable[[Value], bool]] = {
    "Tensor": lambda value: isinstance(value, int | float | complex),  # which torch makes a tensor of
    "int": _is_int,
    "SymInt": _is_int,
    "float": _is_number,
    "number": lambda value: isinstance(value, int | float | complex),
    "Scalar": lambda value: isinstance(value, int | float | complex),
    "complex": lambda value: _is_number(value) or isinstance(value, complex),
    "bool": lambda value: isinstance(value, bool),
    "SymBool": lambda value: isinstance(value, bool),
    "SymFloat": _is_number,
    "str": lambda value: isinstance(value, str),
    "ScalarType": lambda value: isinstance(value, DtypeValue),
    "Device": lambda value: isinstance(value, DeviceValue),
    "Layout": lambda value: isinstance(value, LayoutValue),
    "MemoryFormat": lambda value: isinstance(value, FormatValue),
}
_COMPUTED = frozenset({"Tensor", "int", "SymInt", "float", "number", "Scalar", "bool", "SymBool", "SymFloat"})


def _fits(value: Value, kind: ArgumentType) -> bool:
    if value is None:
        return kind.is_optional
    if isinstance(value, SliceValue):
        return False
    if isinstance(value, Ref):
        return kind.base in _COMPUTED  # a list of several can be the value of one node, as of a split
    if kind.is_list:
        if isinstance(value, tuple):
            return all((item is None and kind.has_optional_items) or _fits_one(item, kind.base) for item in value)
        return kind.base != "Tensor" and _fits_one(value, kind.base)  # one number for all dims
    return _fits_one(value, kind.base)


def _fits_one(value: Value, base: str) -> bool:
    if isinstance(value, Ref):
        return base in _COMPUTED
    kind = _KINDS.get(base)
    return kind is not None and kind(value)


def _type_text(kind: ArgumentType) -> str:
    text = {"ScalarType": "a dtype", "SymInt": "int", "Scalar": "a number", "number": "a number"}.get(
        kind.base, kind.base
    )
    return f"{text}{' or a list of them' if kind.is_list else ''}{' or nothing' if kind.is_optional else ''}"
