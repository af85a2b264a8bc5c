"""Tensor leaves of a foreign tree: paths and dotted keys, groups with ties, state.json entries of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.core.names import key_problem
from holdfast.format import statejson
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class TensorLeaf:
    """A tensor of a tree: its recipe, and its original dtype if the recipe cannot express it."""

    recipe: Recipe[Place]
    logical: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The original shape of the tensor."""
        pair = self.logical is not None and self.logical.startswith("complex")
        return self.recipe.shape[:-1] if pair else self.recipe.shape


def leaves_of(value: Any, path: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], TensorLeaf]]:
    """Yield every tensor of a tree with its path of dict keys and list positions."""
    if isinstance(value, TensorLeaf):
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
    elif not isinstance(value, TensorLeaf):
        yield path


def has_leaf(value: Any) -> bool:
    """Return True if a tree contains a tensor."""
    return next(leaves_of(value), None) is not None


def dotted(path: tuple[object, ...]) -> str:
    """Return the key of a tensor at a path."""
    return ".".join(map(str, path))


def keyed(value: Any, name: str, where: str) -> dict[str, TensorLeaf]:
    """Return the tensors of a tree by dotted key; the key of a single tensor is `name`."""
    found: dict[str, TensorLeaf] = {}
    for path, leaf in leaves_of(value):
        key = dotted(path) or name
        problem = key_problem(key)
        if problem:
            raise Unsupported(f"{where}: the key {key[:80]!r} {problem}")
        if key in found:
            raise Unsupported(f"{where}: two tensors of {name[:80]!r} have the key {key[:80]!r}")
        found[key] = leaf
    return found


def group_of(kind: str, tensors: Mapping[str, TensorLeaf], *, tie: bool = False) -> Group:
    """Build a group of tensors by key. With `tie`, tensors with the same stored bytes are tied."""
    kept: dict[str, TensorLeaf] = {}
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


def _bytes_of(leaf: TensorLeaf) -> object:
    """Return a value that is equal for tensors with the same bytes in the same order."""
    terms = tuple(
        (term.box, term.part, term.order, term.casts, term.source.file, term.source.begin, term.source.spec.shape)
        for term in leaf.recipe.terms
    )
    return leaf.recipe.shape, leaf.recipe.dtype.name, leaf.logical, terms


def state_entry(value: Any, name: str) -> dict[str, Any]:
    """Return the state.json entry of a tree, with references to its tensors. Raises Unsupported for other objects."""

    def claim(item: Any, path: str, keys: statejson.Keys) -> Any:
        return {"$tensor": dotted(keys) or name} if isinstance(item, TensorLeaf) else None

    kind = "tensors" if has_leaf(value) else "json"
    return {"kind": kind, "value": statejson.encode(value, name, claim)}
