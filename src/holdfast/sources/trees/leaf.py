"""Trees of foreign values: dicts, lists and plain values, with tensors as leaves that stay in their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.format import statejson
from holdfast.format.names import key_problem
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor of a tree: its recipe, and the dtype that it had where the recipe cannot say it."""

    recipe: Recipe[Place]
    logical: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor had."""
        pair = self.logical is not None and self.logical.startswith("complex")
        return self.recipe.shape[:-1] if pair else self.recipe.shape


def leaves_of(value: Any, path: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], Leaf]]:
    """Every tensor of a tree with its path: dict keys and list positions."""
    if isinstance(value, Leaf):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves_of(item, (*path, index))


def plain_paths(value: Any, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the path of every value of a tree that is not a tensor; a container without tensors is one value."""
    if isinstance(value, dict | list | tuple) and (not path or has_leaf(value)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from plain_paths(item, (*path, key))
    elif not isinstance(value, Leaf):
        yield path


def has_leaf(value: Any) -> bool:
    """Whether a tree has a tensor in it."""
    return next(leaves_of(value), None) is not None


def dotted(path: tuple[object, ...]) -> str:
    """The key of a tensor at a path."""
    return ".".join(map(str, path))


def keyed(value: Any, name: str, where: str) -> dict[str, Leaf]:
    """The tensors of a tree by dotted key, that of a lone tensor being `name`."""
    found: dict[str, Leaf] = {}
    for path, leaf in leaves_of(value):
        key = dotted(path) or name
        problem = key_problem(key)
        if problem:
            raise Unsupported(f"{where}: the key {key[:80]!r} {problem}")
        if key in found:
            raise Unsupported(f"{where}: two tensors of {name[:80]!r} have the key {key[:80]!r}")
        found[key] = leaf
    return found


def group_of(kind: str, tensors: Mapping[str, Leaf], *, tie: bool = False) -> Group:
    """A group of tensors by key. With `tie`, tensors that are the same bytes are one with several keys."""
    kept: dict[str, Leaf] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for key, leaf in tensors.items():
        first = seen.setdefault(_bytes_of(leaf), key) if tie and leaf.recipe.terms else key
        if first != key:
            aliases[key] = first
            continue
        kept[key] = leaf
    logical = {key: leaf.logical for key, leaf in kept.items() if leaf.logical is not None}
    return Group(kind, {key: leaf.recipe for key, leaf in kept.items()}, aliases, logical)


def _bytes_of(leaf: Leaf) -> object:
    """What is equal for tensors that are the same bytes in the same order."""
    terms = tuple(
        (term.box, term.part, term.order, term.casts, term.source.file, term.source.begin, term.source.spec.shape)
        for term in leaf.recipe.terms
    )
    return leaf.recipe.shape, leaf.recipe.dtype.name, leaf.logical, terms


def state_entry(value: Any, name: str) -> dict[str, Any]:
    """The entry of state.json for a tree; its tensors are references. Raises Unsupported for odd values."""

    def claim(item: Any, path: str, keys: statejson.Keys) -> Any:
        return {"$tensor": dotted(keys) or name} if isinstance(item, Leaf) else None

    kind = "tensors" if has_leaf(value) else "json"
    return {"kind": kind, "value": statejson.encode(value, name, claim)}
