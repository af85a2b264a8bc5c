"""Descriptions of stored tensor subclasses: their entry in state.json, and the keys of the tensors inside."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import LayoutError
from holdfast.layout.coordinates import key_at, label
from holdfast.plan.contents import Contents

SUBCLASSES = "subclasses"  # the kind of the entry, and the prefix of its name, which no value of a state can have


def entry_name(group: str) -> str:
    """Return the name of the entry that describes the tensor subclasses of a group."""
    return f"{SUBCLASSES}:{group}"


@dataclass(frozen=True, slots=True)
class StoredSubclasses:
    """The tensor subclasses of a stored group: descriptions by key, and the keys of the tensors inside."""

    descriptions: Mapping[str, Mapping[str, Any]]
    outer: Mapping[str, str]  # by key of a tensor inside: the key of the subclass

    @staticmethod
    def of(contents: Contents, group: str) -> StoredSubclasses:
        entry = contents.state.get(entry_name(group)) or {}
        value = entry.get("value")
        descriptions = {
            key: description
            for key, description in (value.items() if isinstance(value, dict) else ())
            if isinstance(description, dict)
        }
        outer = {inner: key for key, description in descriptions.items() for inner in inner_keys(key, description)}
        return StoredSubclasses(descriptions, outer)

    def inner_of(self, key: str) -> Iterator[str]:
        """Yield the keys of the tensors inside a subclass."""
        return inner_keys(key, self.descriptions[key])


def inner_keys(key: str, description: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of the tensors inside a subclass, at every coordinate that stores its own."""
    axes = description.get("axes") or {}
    coordinates = [label(tuple(axes), index) for index in itertools.product(*map(range, axes.values()))]
    for name in _inner_names(description):
        yield from (key_at(f"{key}.{name}", coordinate) for coordinate in coordinates)
    if axes:  # a shard may be plain
        yield from (key_at(key, coordinate) for coordinate in coordinates)


def _inner_names(description: Mapping[str, Any]) -> Iterator[str]:
    for name, inner in (description.get("inner") or {}).items():
        if isinstance(inner, dict):
            yield from (f"{name}.{nested}" for nested in _inner_names(inner))
        else:
            yield name


def merge_descriptions(name: str, answers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of one group from the descriptions of all ranks; raises LayoutError if they differ."""
    merged: dict[str, Any] = {}
    for answer in answers:
        for key, description in answer.items():
            known = merged.setdefault(key, description)
            if known != description:
                raise LayoutError(
                    f"{name.removeprefix(f'{SUBCLASSES}:')}: {key} differs between ranks: {known} on one, "
                    f"{description} on another"
                )
    return {"kind": SUBCLASSES, "value": dict(sorted(merged.items()))}
