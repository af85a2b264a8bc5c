"""References from encoded values of state.json to tensors: listed, and updated when keys change."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from holdfast.core.names import natural_key
from holdfast.plan.contents import Contents

_TAGS = ("$tensor", "$array")
_PAIRS = ("$dict", "$OrderedDict", "$Counter", "$defaultdict")
_REMOVED = object()


def references(value: Any) -> dict[str, str]:
    """Return every key that an encoded value refers to, with its tag."""
    out: dict[str, str] = {}
    _collect(value, out)
    return out


def _collect(value: Any, out: dict[str, str]) -> None:
    if isinstance(value, list):
        for item in value:
            _collect(item, out)
    elif isinstance(value, dict):
        for tag, content in value.items():
            if tag in _TAGS and isinstance(content, str):
                out[content] = tag
            else:
                _collect(content, out)


def update_references(contents: Contents) -> Contents:
    """Make all values refer to the tensors that exist, after keys were renamed or dropped."""
    state = {}
    for name, entry in contents.state.items():
        group = contents.groups.get(name)
        state[name] = update_entry_references(entry, () if group is None else (*group.tensors, *group.aliases))
    return replace(contents, state=state)


def update_entry_references(entry: Any, keys: Collection[str]) -> Any:
    """Remove references to keys outside `keys`; in a dict of tensors, add the missing ones.

    An entry that differs between ranks stays unchanged: its keys belong to single coordinates.
    """
    if "value" not in entry or entry.get("kind") == "optimizer":
        return entry
    keys, found = frozenset(keys), references(entry["value"])
    is_tree = entry["kind"] == "tensors"
    fresh = sorted((key for key in keys if key not in found), key=natural_key) if is_tree else []
    if not fresh and all(key in keys for key in found):
        return entry
    value = _without(entry["value"], keys)
    if fresh:
        value = _with(value, fresh)
    return entry | {"kind": "json" if is_tree and not references(value) else entry["kind"], "value": value}


def without_references(value: Any, keys: Collection[str]) -> Any:
    """Remove the references to some keys from an encoded value."""
    return _without(value, references(value).keys() - set(keys))


def _without(value: Any, keys: Collection[str]) -> Any:
    """Remove references to other keys; in a list None replaces each, which keeps the positions."""
    kept = _pruned(value, keys)
    return {} if kept is _REMOVED else kept


def _pruned(value: Any, keys: Collection[str]) -> Any:
    if isinstance(value, list):
        items = [_pruned(item, keys) for item in value]
        return [None if item is _REMOVED else item for item in items]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag in _TAGS:
            return value if isinstance(content, str) and content in keys else _REMOVED
        if tag in _PAIRS and _are_pairs(content):
            pairs = [[key, _pruned(item, keys)] for key, item in content]
            return {tag: [pair for pair in pairs if pair[1] is not _REMOVED]}
    items_by_key = {key: _pruned(item, keys) for key, item in value.items()}
    return {key: item for key, item in items_by_key.items() if item is not _REMOVED}


def _are_pairs(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in content)


def _with(value: Any, keys: Collection[str]) -> Any:
    """Add tensors, each under its full key; a value that is not a dict becomes one."""
    pairs = [[key, {"$tensor": key}] for key in keys]
    if isinstance(value, dict) and len(value) == 1:
        ((tag, content),) = value.items()
        if tag in _PAIRS and _are_pairs(content):
            return {tag: [*content, *pairs]}
    plain = isinstance(value, dict) and not any(key.startswith("$") for key in value)
    if not plain:
        pairs = [[key, {tag: key}] for key, tag in references(value).items()] + pairs
    known = value if plain else {}
    if any(key.startswith("$") for key in keys):
        return {"$dict": [*map(list, known.items()), *pairs]}
    return known | dict(pairs)  # type: ignore[arg-type]
