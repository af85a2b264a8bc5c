"""Flatten nested values of `paddle.save`: tensors get dotted keys, plain values become state.json entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import Damaged, Unsupported
from holdfast.core.names import check_key
from holdfast.format import statejson
from holdfast.plan.recipe import Recipe
from holdfast.sources.paddle.pdparams_pickle import TABLE, table_of

LONE = "value"  # the key of a tensor saved on its own

Tree = Any  # dicts, lists and tuples of recipes and plain values


@dataclass(slots=True)
class Flat:
    """The tensors of a tree by dotted key, their numbered Paddle names, and the plain values."""

    where: str
    tensors: dict[str, Any] = field(default_factory=dict)  # recipes over places
    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, value: Tree, path: tuple[str, ...]) -> None:
        """Add a tree at a path. Raises Damaged if two tensors have the same dotted key."""
        if isinstance(value, dict) and (not path or has_tensor(value)):
            self.names |= {".".join((*path, key)): name for key, name in table_of(value).items()}
            for key, item in value.items():
                if key != TABLE:
                    self.add(item, (*path, key))
        elif isinstance(value, list | tuple) and has_tensor(value):
            for number, item in enumerate(value):
                self.add(item, (*path, str(number)))
        else:
            self._put(".".join(path) or LONE, value)

    def _put(self, key: str, value: Any) -> None:
        if isinstance(value, Recipe):
            check_key(key, self.where)
        known = self.tensors if isinstance(value, Recipe) else self.values
        if known.setdefault(key, value) is not value:
            raise Damaged(
                f"{self.where}: two nested values have the key {key[:80]!r}, once with its dots and once as a path; "
                "rename one of them and save it again"
            )


def flattened(value: Tree, where: str, prefix: tuple[str, ...] = ()) -> Flat:
    """Flatten a tree; `prefix` is put before every key."""
    flat = Flat(where)
    flat.add(value, prefix)
    return flat


def has_tensor(value: Tree) -> bool:
    """Return True if a tree contains a tensor."""
    if isinstance(value, dict):
        return any(has_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(has_tensor(item) for item in value)
    return isinstance(value, Recipe)


def is_state_dict(value: Tree) -> bool:
    """Return True if a tree is a dict that directly contains tensors."""
    return isinstance(value, dict) and any(isinstance(item, Recipe) for item in value.values())


def plain_entries(values: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return state.json entries for plain values by name, and a note for each value that JSON cannot represent."""
    entries: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in values.items():
        try:
            entries[name] = {"kind": "json", "value": statejson.encode(value, name)}
        except Unsupported as error:
            notes.append(f"{where}: left out: {error}")
    return entries, notes
