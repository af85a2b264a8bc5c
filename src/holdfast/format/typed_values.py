"""Values of state.json whose class JSON lacks: paths, times, deques; enums, dataclasses and other `TypedValue`s.

Paths, times and deques are made again by their tag. The class of an enum, dataclass, named tuple or
defaultdict is the program's own: no file names it, so decoding returns a `TypedValue`, and whoever has the
live value makes the object.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from holdfast.core.errors import Unsupported

Encode = Callable[[Any, str, object], Any]  # a value inside another, what its path adds, its key
Decode = Callable[[Any], Any]

_PATHS = (type(Path()), type(PurePath()))
_TORCH = {"dtype": "$dtype", "device": "$device"}
_MADE = frozenset({"$path", "$datetime", "$date", "$time", "$timedelta", "$deque"})  # by decoding, without a class
_CLASSES = frozenset({"$enum", "$dataclass", "$namedtuple", "$defaultdict"})
_LIVE = _CLASSES | frozenset(_TORCH.values())  # by who has the live value
TAGS = _MADE | _LIVE


@dataclass(frozen=True, slots=True)
class TypedValue:
    """A decoded value without its class.

    `items` are the fields of a dataclass or named tuple, the items of a defaultdict, the name and value of an
    enum, or the text of a torch dtype or device.
    """

    tag: str
    items: Mapping[Any, Any]

    @property
    def is_leaf(self) -> bool:
        """True if its items are not values of the program."""
        return self.tag in ("$enum", *_TORCH.values())

    @property
    def kind(self) -> str:
        """The words for it, such as "a dataclass" or "an enum"."""
        name = {"$namedtuple": "named tuple", "$dtype": "torch dtype", "$device": "torch device"}.get(
            self.tag, self.tag[1:]
        )
        return f"an {name}" if name[0] in "aeiou" else f"a {name}"

    def plain(self) -> Any:
        """Return it as plain data: a dict of fields, a tuple, an enum's value, a text."""
        if self.tag == "$enum":
            return self.items["value"]
        if self.tag in _TORCH.values():
            return self.items["text"]
        return tuple(self.items.values()) if self.tag == "$namedtuple" else dict(self.items)


def has_open_class(value: Any) -> bool:
    """Return True for a value of the classes that only the live state has, and for torch's."""
    kind = type(value)
    torch_value = kind.__module__ == "torch" and kind.__name__ in _TORCH
    return isinstance(value, Enum) or is_dataclass_object(value) or is_named_tuple(value) or torch_value


def is_dataclass_object(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_named_tuple(value: Any) -> bool:
    kind = type(value)
    return (
        isinstance(value, tuple)
        and isinstance(getattr(kind, "_fields", None), tuple)
        and callable(getattr(kind, "_make", None))
    )


def set_fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or named tuple by name, without those that are not set."""
    if is_named_tuple(value):
        return dict(zip(type(value)._fields, value, strict=True))
    names = (field.name for field in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def encode_typed(value: Any, path: str, encode: Encode) -> Any:
    """Encode a value of one of these classes, its members with `encode`; None for another value.

    Holdfast's own classes are no values of a program: readers of pickles stand them in for what they do not make.
    """
    kind = type(value)
    if kind.__module__.startswith("holdfast."):
        return None
    if isinstance(value, Enum):
        return {"$enum": [value.name, _encode_enum_value(value, encode)]}
    if is_dataclass_object(value):
        return {"$dataclass": _encode_fields(_all_fields(value, path), encode)}
    if is_named_tuple(value):
        return {"$namedtuple": _encode_fields(set_fields_of(value), encode)}
    if kind is deque:
        return {"$deque": [value.maxlen, [encode(item, f"[{index}]", index) for index, item in enumerate(value)]]}
    if kind in _PATHS:
        return {"$path": encode(str(value), "", "path")}
    if kind.__module__ == "torch" and kind.__name__ in _TORCH:
        return {_TORCH[kind.__name__]: str(value).removeprefix("torch.")}
    return _encode_time(value, path)


def _encode_enum_value(value: Enum, encode: Encode) -> Any:
    """Return the value of an enum if JSON has it; else the name, by which it is then found."""
    return encode(value.value, ".value", "value") if type(value.value) in (str, int, float, bool) else value.name


def _all_fields(value: Any, path: str) -> dict[str, Any]:
    kind = type(value)
    if isinstance(value, dict | list | tuple | set | frozenset):
        raise Unsupported(f"{path}: {kind.__qualname__} is a dataclass and a container; store its items as a plain one")
    fields = set_fields_of(value)
    unset = [field.name for field in dataclasses.fields(value) if field.name not in fields]
    if unset:
        raise Unsupported(f"{path}: the field {unset[0]} of {kind.__qualname__} is not set")
    return fields


def _encode_fields(fields: Mapping[str, Any], encode: Encode) -> dict[str, Any]:
    return {name: encode(item, f".{name}", name) for name, item in fields.items()}


def _encode_time(value: Any, path: str) -> Any:
    kind = type(value)
    if kind is datetime.timedelta:
        return {"$timedelta": [value.days, value.seconds, value.microseconds]}
    if kind is datetime.date:
        return {"$date": value.isoformat()}
    if kind is not datetime.datetime and kind is not datetime.time:
        return None
    tag = f"${kind.__name__}"
    if value.tzinfo is None or type(value.tzinfo) is datetime.timezone:
        return {tag: [value.isoformat(), None, value.fold] if value.fold else value.isoformat()}
    if isinstance(value.tzinfo, ZoneInfo) and value.tzinfo.key:
        return {tag: [value.replace(tzinfo=None).isoformat(), value.tzinfo.key, value.fold]}
    zone = type(value.tzinfo)
    raise Unsupported(
        f"{path}: a time with the time zone {zone.__module__}.{zone.__qualname__} cannot be stored; "
        "use zoneinfo.ZoneInfo or datetime.timezone"
    )


def decode_typed(tag: str, content: Any, decode: Decode, typed: Callable[[TypedValue], Any]) -> Any:
    """Decode the content of one of TAGS, its members with `decode`; `typed` gets what has no class yet."""
    if tag in _LIVE:
        return typed(TypedValue(tag, _decode_items(tag, content, decode)))
    if tag == "$deque":
        longest, items = content
        if not isinstance(items, list) or (longest is not None and type(longest) is not int):
            raise TypeError("a deque has a length or null, and a list of items")
        return deque(map(decode, items), longest)
    if tag == "$path":
        return Path(content)
    if tag == "$date":
        return datetime.date.fromisoformat(content)
    if tag == "$timedelta":
        days, seconds, microseconds = content
        return datetime.timedelta(days, seconds, microseconds)
    return _decode_time(datetime.datetime if tag == "$datetime" else datetime.time, content)


def _decode_items(tag: str, content: Any, decode: Decode) -> dict[Any, Any]:
    if tag == "$enum":
        name, value = content
        if (name is not None and type(name) is not str) or isinstance(value, list | dict):
            raise TypeError("an enum has a name and a plain value")
        return {"name": name, "value": value}
    if tag in _TORCH.values():
        return {"text": _text(content)}
    pairs: Iterable[Any] = content if tag == "$defaultdict" else content.items()
    keys = decode if tag == "$defaultdict" else _text
    return {keys(key): decode(item) for key, item in pairs}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _decode_time(kind: Any, content: Any) -> Any:
    if isinstance(content, str):
        return kind.fromisoformat(content)
    text, zone, fold = content
    value = kind.fromisoformat(text).replace(fold=fold)
    try:
        return value if zone is None else value.replace(tzinfo=ZoneInfo(zone))
    except ZoneInfoNotFoundError as error:
        raise Unsupported(f"the time zone {zone!r} is not known here: {error}") from None
