"""Classes for loaded values: an enum, dataclass, named tuple or defaultdict gets the class of the live value.

A file never names a class. Where the live state has none, the value becomes plain data, and the report
says so; where the live class does not fit, the load says what differs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from holdfast.format.typed_values import TypedValue, is_dataclass_object, is_named_tuple, set_fields_of

NO_LIVE: Any = object()  # the live state has no value at this path


@dataclass(frozen=True, slots=True)
class TypeFinding:
    """A value that gets no class of the live state: a note if it becomes plain data, else a mismatch."""

    text: str
    mismatched: bool


def compare_types(saved: Any, live: Any, path: str) -> Iterator[TypeFinding]:
    """Yield what a load of a decoded value will say about classes; touches nothing."""
    if isinstance(saved, TypedValue):
        problem = type_mismatch(saved, live)
        if problem:
            yield TypeFinding(f"{path}: {problem}", mismatched=True)
            return
        if not has_class(saved, live):
            kind = "missing" if live is NO_LIVE else type(live).__name__
            plain = type(saved.plain()).__name__
            yield TypeFinding(f"{path}: saved as {saved.kind}, the live value is {kind}: loaded as {plain}", False)
    for key, item, other in members(saved, live):
        yield from compare_types(item, other, f"{path}.{key}")


def has_class(saved: TypedValue, live: Any) -> bool:
    """Return True if the live value has the class that the saved value needs; torch's own are always known."""
    return {
        "$enum": isinstance(live, Enum),
        "$dataclass": is_dataclass_object(live),
        "$namedtuple": is_named_tuple(live),
        "$defaultdict": type(live) is defaultdict,
    }.get(saved.tag, True)


def type_mismatch(saved: TypedValue, live: Any) -> str:
    """Return why the live value's class cannot hold the saved value; "" if it can, or if it has no such class."""
    if saved.tag in ("$dtype", "$device"):
        return "" if _torch_value(saved) is not None else f"torch has no {saved.tag[1:]} {saved.items['text']!r}"
    if not has_class(saved, live) or saved.tag == "$defaultdict":
        return ""
    name = type(live).__qualname__
    if saved.tag == "$enum":
        known = _member(saved, type(live)) is not None
        return "" if known else f"{name} has no member {saved.items['name']} or value {saved.items['value']!r}"
    stored, own = set(saved.items), set(_field_names(live))
    parts = [f"{name} has no field {field}" for field in sorted(stored - own)]
    parts += [f"the field {field} of {name} was not saved" for field in sorted(own - stored)]
    return "; ".join(parts)


def _field_names(live: Any) -> tuple[str, ...]:
    return type(live)._fields if is_named_tuple(live) else tuple(field.name for field in dataclasses.fields(live))


def make_typed(saved: TypedValue, live: Any, items: Mapping[Any, Any]) -> Any:
    """Return a new object of the live value's class with these items; plain data if it has no such class."""
    if saved.tag in ("$dtype", "$device"):
        return _torch_value(saved)
    if not has_class(saved, live):
        return saved.plain() if saved.is_leaf else TypedValue(saved.tag, items).plain()
    if saved.tag == "$enum":
        return _member(saved, type(live))
    if saved.tag == "$defaultdict":
        return defaultdict(live.default_factory, items)
    if saved.tag == "$namedtuple":
        return type(live)._make(items[field] for field in type(live)._fields)
    made = copy.copy(live)
    set_fields(made, items)
    return made


def set_fields(target: Any, items: Mapping[str, Any]) -> None:
    """Set the fields of a dataclass as they were saved: without __init__, also if it is frozen.

    Cached properties are forgotten: they were computed from the fields before. Items that are no fields are left out.
    """
    names = _field_names(target)
    for field, item in items.items():
        if field in names:
            object.__setattr__(target, field, item)
    for kind in type(target).__mro__:
        for name, attribute in vars(kind).items():
            if isinstance(attribute, functools.cached_property):
                getattr(target, "__dict__", {}).pop(name, None)


def _member(saved: TypedValue, kind: type[Enum]) -> Enum | None:
    """Return the member with the saved name, else that with the saved value."""
    name, value = saved.items["name"], saved.items["value"]
    if name in kind.__members__:
        return kind[name]
    try:
        return kind(value)
    except (ValueError, TypeError):
        return None


def _torch_value(saved: TypedValue) -> torch.dtype | torch.device | None:
    text = saved.items["text"]
    if saved.tag == "$dtype":
        found = getattr(torch, text, None)
        return found if isinstance(found, torch.dtype) else None
    try:
        return torch.device(text)
    except RuntimeError:
        return None


def members(saved: Any, live: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the key, saved value and live value of each member of a decoded container."""
    if isinstance(saved, TypedValue):
        if saved.is_leaf:
            return
        by_key: Any = live if isinstance(live, dict) else set_fields_of(live) if has_class(saved, live) else {}
        yield from ((key, item, by_key.get(key, NO_LIVE)) for key, item in saved.items.items())
    elif isinstance(saved, dict):
        by_key = live if isinstance(live, dict) else {}
        yield from ((key, item, by_key.get(key, NO_LIVE)) for key, item in saved.items())
    elif isinstance(saved, list | tuple | deque):
        in_order = list(live) if isinstance(live, list | tuple | deque) else []
        for index, item in enumerate(saved):
            yield index, item, in_order[index] if index < len(in_order) else NO_LIVE


def with_live_types(saved: Any, live: Any) -> Any:
    """Return a decoded value with the classes of the live value. Nothing of `live` is changed.

    Where the live class does not fit, the live value is returned: `compare_types` has reported it.
    """
    if isinstance(saved, TypedValue):
        if type_mismatch(saved, live):
            return live
        return make_typed(saved, live, {key: with_live_types(item, other) for key, item, other in members(saved, live)})
    if isinstance(saved, dict):
        made = type(saved)()
        for key, item, other in members(saved, live):
            made[key] = with_live_types(item, other)
        return made
    if isinstance(saved, deque):
        return deque((with_live_types(item, other) for _, item, other in members(saved, live)), saved.maxlen)
    if type(saved) in (list, tuple):
        return type(saved)(with_live_types(item, other) for _, item, other in members(saved, live))
    return saved


def keep_typed(value: TypedValue) -> TypedValue:
    """Leave a value without its class, for `statejson.decode`."""
    return value
