"""Settings from TOML into dataclasses: strictly, and with a word on what was meant."""

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
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def read_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text; raises InvalidArgument with the line that is wrong."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{where} is not TOML: {error}") from None


def apply_sets(tables: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The tables with every "section.key=value" put in; values are TOML, and a bare word is a text."""
    out = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise InvalidArgument(f"--set {assignment}: write section.key=value, such as train.steps=100")
        if not isinstance(out.setdefault(section, {}), dict):
            raise InvalidArgument(f"--set {assignment}: {section} is no section")
        out[section][key] = _value(value.strip())
    return out


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def build(kind: type[_T], table: Any, where: str) -> _T:
    """A dataclass from a table: unknown keys refused with the nearest, values of the right type only."""
    if not isinstance(table, dict):
        raise InvalidArgument(f"{where} must be a section of settings, not {table!r}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    refuse_unknown(table, names, where)
    given = {key: _checked(value, hints[key], f"{where}.{key}" if where else key) for key, value in table.items()}
    missing = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.name not in given and _is_required(field)
    ]
    if missing:
        raise InvalidArgument(f"{where} lacks {', '.join(missing)}")
    return kind(**given)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def refuse_unknown(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise for the first name that is not known, with the nearest that is."""
    known = list(known)
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise InvalidArgument(f"there is no setting {f'{where}.' if where else ''}{name}: {meant}")


def _checked(value: Any, hint: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"{where} = {value!r}: it must be a number that is finite")
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return build(option, value, where)
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and isinstance(value, option) and isinstance(value, bool) == (option is bool):
            return value
    expected = " or ".join(_WORDS.get(option, str(option)) for option in options if option is not types.NoneType)
    raise InvalidArgument(f"{where} = {value!r}: it must be {expected}")


def write_toml(tables: Mapping[str, Any]) -> str:
    """Sections of plain values as TOML; what is None is left out."""
    lines = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_written(value)}" for key, value in table.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _written(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
