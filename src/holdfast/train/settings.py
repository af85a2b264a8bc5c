"""TOML and dataclasses in general: parse, override keys, check names and types with suggestions, write TOML."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from holdfast.core.errors import InvalidArgument

_T = TypeVar("_T")
_TYPE_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


def read_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML text; raises InvalidArgument with the line of an error."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{where} is not valid TOML: {error}") from None


def apply_sets(tables: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Return the tables with "section.key=value" assignments applied; values are TOML, bare words are strings."""
    out = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise InvalidArgument(f"--set {assignment}: write section.key=value, such as train.steps=100")
        if not isinstance(out.setdefault(section, {}), dict):
            raise InvalidArgument(f"--set {assignment}: {section} is not a section")
        out[section][key] = _value(value.strip())
    return out


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def build(kind: type[_T], table: Any, where: str) -> _T:
    """Build a dataclass from a table; raises InvalidArgument for unknown keys and values of the wrong type."""
    if not isinstance(table, dict):
        raise InvalidArgument(f"{where} must be a section of settings, not {table!r}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    refuse_unknown(table, names, where)
    values = {key: _checked(value, hints[key], f"{where}.{key}" if where else key) for key, value in table.items()}
    missing = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.name not in values and _is_required(field)
    ]
    if missing:
        raise InvalidArgument(f"{where} is missing {', '.join(missing)}")
    return kind(**values)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def refuse_unknown(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise InvalidArgument for the first unknown name, with the nearest known name."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
            raise InvalidArgument(f"there is no setting {f'{where}.' if where else ''}{name}: {meant}")


def _checked(value: Any, hint: Any, where: str) -> Any:
    if dataclasses.is_dataclass(value):
        return value  # built already
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"{where} = {value!r}: it must be a finite number")
    for option in options:
        found = _collected(value, option, where)
        if found is not None:
            return found
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return build(option, value, where)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and isinstance(value, option) and isinstance(value, bool) == (option is bool):
            return value
    expected = " or ".join(_type_name(option) for option in options if option is not types.NoneType)
    raise InvalidArgument(f"{where} = {value!r}: it must be {expected}")


def _collected(value: Any, hint: Any, where: str) -> Any:
    """Return a checked array for `tuple[X, ...]`, or table for `Mapping[str, X]`; None if it is neither."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_checked(item, of[0], f"{where}[{number}]") for number, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {key: _checked(item, of[1], f"{where}.{key}") for key, item in value.items()}
    return None


def _type_name(hint: Any) -> str:
    names = {tuple: "an array", Mapping: "a table"}
    return _TYPE_NAMES.get(hint, names.get(typing.get_origin(hint), str(hint)))


def write_toml(tables: Mapping[str, Any]) -> str:
    """Write sections of values as TOML; None values are omitted, tables within sections are written inline."""
    lines = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_written(value)}" for key, value in table.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = [f"{_written(key)} = {_written(item)}" for key, item in value.items() if item is not None]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
