"""Classes for loaded values: an enum, dataclass, named tuple or defaultdict gets the class of the live value.

A file never names a class. Where the live state has none, the value becomes plain data, and the report
says so; where the live class does not fit, the load says what differs.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from holdfast.format.typed_values import TypedValue, fields_of, is_dataclass_object, is_named_tuple

NO_LIVE: Any = object()  # the live state has no value at this path


@dataclass(frozen=True, slots=True)
class TypeFinding:
    """A value that gets no class of the live state: a note if it becomes plain data, else a mismatch."""

    text: str
    mismatched: bool


def compare_types(saved: Any, live: Any, path: str) -> Iterator[TypeFinding]:
    """Yield what a load of a decoded value will say about classes; touches nothing."""
    if isinstance(saved, TypedValue):
        problem = misfit(saved, live)
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


def misfit(saved: TypedValue, live: Any) -> str:
    """Return why the live value's class cannot hold the saved value; "" if it can, or if it has no such class."""
    if saved.tag in ("$dtype", "$device"):
        return "" if _torch_value(saved) is not None else f"torch has no {saved.tag[1:]} {saved.items['text']!r}"
    if not has_class(saved, live):
        return ""
    name = type(live).__qualname__
    if saved.tag == "$enum":
        known = _member(saved, type(live)) is not None
        return "" if known else f"{name} has no member {saved.items['name']} or value {saved.items['value']!r}"
    if saved.tag == "$defaultdict":
        return ""
    stored, own = set(saved.items), set(fields_of(live))
    parts = [f"{name} has no field {field}" for field in sorted(stored - own)]
    parts += [f"the field {field} of {name} was not saved" for field in sorted(own - stored)]
    return "; ".join(parts)


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
    """Set the fields of a dataclass as they were saved: without __init__, also if it is frozen."""
    for field, item in items.items():
        object.__setattr__(target, field, item)


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
        own: Any = live if isinstance(live, dict) else fields_of(live) if has_class(saved, live) else {}
        yield from ((key, item, own.get(key, NO_LIVE)) for key, item in saved.items.items())
    elif isinstance(saved, dict):
        known = live if isinstance(live, dict) else {}
        for key, item in saved.items():
            yield key, item, known.get(typed_key(key, known), NO_LIVE)
    elif isinstance(saved, list | tuple | deque):
        others = list(live) if isinstance(live, list | tuple | deque) else []
        for index, item in enumerate(saved):
            yield index, item, others[index] if index < len(others) else NO_LIVE


def typed_key(saved: Any, live: Iterable[Any]) -> Any:
    """Return a key of a dict or a member of a set with its class, found among the live keys or members."""
    if isinstance(saved, tuple):
        return tuple(typed_key(item, ()) for item in saved)
    if not isinstance(saved, TypedValue):
        return saved
    for kind in {type(other): other for other in live}.values():
        if has_class(saved, kind) and not misfit(saved, kind):
            return make_typed(saved, kind, saved.items)
    return make_typed(saved, NO_LIVE, saved.items)


def with_live_types(saved: Any, live: Any) -> Any:
    """Return a decoded value with the classes of the live value. Nothing of `live` is changed."""
    if isinstance(saved, TypedValue):
        if misfit(saved, live):
            return live
        return make_typed(saved, live, {key: with_live_types(item, other) for key, item, other in members(saved, live)})
    if isinstance(saved, set | frozenset):
        others = live if isinstance(live, set | frozenset) else ()
        return type(saved)(typed_key(item, others) for item in saved)
    if isinstance(saved, dict):
        own: Iterable[Any] = live if isinstance(live, dict) else ()
        made = type(saved)()
        for key, item, other in members(saved, live):
            made[typed_key(key, own)] = with_live_types(item, other)
        return made
    if isinstance(saved, deque):
        return deque((with_live_types(item, other) for _, item, other in members(saved, live)), saved.maxlen)
    if type(saved) in (list, tuple):
        return type(saved)(with_live_types(item, other) for _, item, other in members(saved, live))
    return saved


def has_typed_values(saved: Any) -> bool:
    """Return True if a decoded value needs classes of the live state, anywhere in it."""
    if isinstance(saved, TypedValue):
        return True
    if isinstance(saved, dict):
        return any(map(has_typed_values, saved)) or any(map(has_typed_values, saved.values()))
    return isinstance(saved, list | tuple | deque | set | frozenset) and any(map(has_typed_values, saved))


def keep_typed(value: TypedValue) -> TypedValue:
    """Leave a value without its class, for `statejson.decode`."""
    return value
