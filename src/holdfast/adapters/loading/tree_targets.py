"""Load into trees: tensors and arrays are filled in place, every other value is replaced by the saved one.

After a load the live tree equals the saved tree. Tensors, arrays, dicts and lists keep their identity
if the saved tree has the same kind of value at the same path, so that references in the program stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from holdfast.adapters.tensors import array_overlaps
from holdfast.adapters.tree import contains_tensor, native_dtype
from holdfast.core.errors import Unsupported
from holdfast.format import statejson

_NO_LIVE: Any = object()  # the live tree has no value at this path
_NO_TENSOR: Any = object()  # the saved value refers to a tensor that the live tree lacks


@dataclass(frozen=True, slots=True)
class Reference:
    """A tensor or array of a saved tree, by its key."""

    tag: str
    key: str


@dataclass(frozen=True, slots=True)
class LiveLeaf:
    """A live tensor or array, and the tensor that a load fills for it.

    `finish` runs once the tensor is filled and returns the value to store in the tree.
    `problem` says why an array cannot be filled; "" if it can.
    """

    live: Any
    tensor: torch.Tensor
    finish: Callable[[], Any]
    tag: str
    problem: str = ""
    copied: bool = False  # filled through a copy


def leaf_of(live: Any, where: str) -> LiveLeaf:
    """Return the leaf of a live tensor or array."""
    if isinstance(live, torch.Tensor):
        return LiveLeaf(live, live, lambda: live, "$tensor")
    native = native_dtype(live, where)
    if array_overlaps(live):
        problem = (
            f"{where}: several elements of the live numpy array share memory (strides {list(live.strides)} for "
            f"shape {list(live.shape)}), so it cannot hold the saved values; replace it with a copy: np.array(...)"
        )
        return LiveLeaf(live, torch.empty(0), lambda: live, "$array", problem)
    if live.flags.writeable and live.dtype == native and _torch_can_share(live):
        return LiveLeaf(live, torch.from_numpy(live), lambda: live, "$array")
    # Torch cannot write to this memory: fill a new array and copy it back, or replace a read-only array.
    fresh = np.empty(live.shape, native)
    if not live.flags.writeable:
        return LiveLeaf(live, torch.from_numpy(fresh), lambda: fresh, "$array")

    def copy_back() -> Any:
        np.copyto(live, fresh)
        return live

    return LiveLeaf(live, torch.from_numpy(fresh), copy_back, "$array", copied=True)


def _torch_can_share(array: np.ndarray[Any, Any]) -> bool:
    return all(step >= 0 and step % array.itemsize == 0 for step in array.strides)


def live_leaves(name: str, value: Any) -> tuple[Any, dict[str, LiveLeaf]]:
    """Return a live tree in its encoded form, and its tensors and arrays by key."""
    leaves: dict[str, LiveLeaf] = {}

    def claim(item: Any, path: str, keys: statejson.Keys) -> Any:
        if not isinstance(item, torch.Tensor | np.ndarray):
            return None
        key = ".".join(map(str, keys)) if keys else name
        if key in leaves:
            raise Unsupported(f"{path}: two tensors of {name!r} have the key {key!r}")
        leaves[key] = leaf_of(item, path)
        return {leaves[key].tag: key}

    encoded = statejson.encode(value, name, claim)
    return encoded, {key: _check_shared_memory(leaf, key, name, leaves) for key, leaf in leaves.items()}


def _check_shared_memory(leaf: LiveLeaf, key: str, name: str, leaves: Mapping[str, LiveLeaf]) -> LiveLeaf:
    """Return the leaf, with a problem if it is filled through a copy and shares memory: the last copy would win."""
    if not leaf.copied:
        return leaf
    for other_key, other in leaves.items():
        if other is not leaf and isinstance(other.live, np.ndarray) and np.may_share_memory(leaf.live, other.live):
            problem = (
                f"{name}: {key} and {other_key} share memory in the live state, and {key} has negative strides or "
                "non-native byte order, so it cannot be filled in place; replace one with a copy: np.array(...)"
            )
            return replace(leaf, problem=problem)
    return leaf


def decode_references(value: Any, where: str) -> Any:
    """Decode a saved tree, with a `Reference` in place of each tensor and array."""

    def refer(tag: str, content: Any) -> Reference:
        if tag not in ("$tensor", "$array") or not isinstance(content, str):
            raise Unsupported(f"{where}: unknown tag {tag[:40]!r}")
        return Reference(tag, content)

    return statejson.decode(value, where, refer)


def replaced_tensors(saved: Any, live: Any) -> Iterator[tuple[str, Any]]:
    """Yield the key of each saved tensor or array whose live value is not a tensor or array, with that value."""
    if isinstance(saved, Reference):
        if not isinstance(live, torch.Tensor | np.ndarray):
            yield saved.key, live
    elif isinstance(saved, dict) and isinstance(live, dict):
        for key in saved.keys() & live.keys():
            yield from replaced_tensors(saved[key], live[key])
    elif isinstance(saved, list | tuple) and isinstance(live, list | tuple):
        for old, new in zip(saved, live, strict=False):
            yield from replaced_tensors(old, new)


def has_plain_values(saved: Any) -> bool:
    """Return True if a saved tree has values other than tensors, arrays, dicts, lists and tuples."""
    if isinstance(saved, dict):
        return any(map(has_plain_values, saved.values()))
    if isinstance(saved, list | tuple):
        return any(map(has_plain_values, saved))
    return not isinstance(saved, Reference)


@dataclass(slots=True)
class TreeAssembly:
    """Builds the loaded tree; `leaves` are those of the live tree, `filled` the keys that were loaded.

    Live tensors that the checkpoint does not fill (with strict=False or patterns) are kept. Dicts and lists
    are rewritten in place, each at most once: a container at two live paths becomes two if the saved values
    differ.
    """

    leaves: Mapping[str, LiveLeaf]
    filled: frozenset[str]
    _writes: list[Callable[[], None]] = field(default_factory=list)
    _rewritten: set[int] = field(default_factory=set)

    def run(self, saved: Any, live: Any) -> Any:
        """Return the loaded tree, reusing `live` and its containers where possible."""
        made = self._value(saved, live)
        for write in self._writes:
            write()
        return live if made is _NO_TENSOR else made

    def _value(self, saved: Any, live: Any) -> Any:
        if isinstance(saved, Reference):
            return self._leaf(saved, live)
        if isinstance(live, torch.Tensor | np.ndarray):
            return live  # reported as missing in the checkpoint, or excluded by a pattern
        if type(saved) is list or type(saved) is tuple:
            return self._sequence(saved, live)
        if isinstance(saved, dict):
            return self._dict(saved, live)
        return saved

    def _leaf(self, saved: Reference, live: Any) -> Any:
        leaf = self.leaves.get(saved.key)
        if leaf is not None and leaf.live is live and saved.key in self.filled:
            return leaf.finish()
        return _NO_TENSOR if live is _NO_LIVE else live

    def _sequence(self, saved: list[Any] | tuple[Any, ...], live: Any) -> Any:
        known = live if isinstance(live, list | tuple) else ()
        items = []
        for index, item in enumerate(saved):
            made = self._value(item, known[index] if index < len(known) else _NO_LIVE)
            if made is not _NO_TENSOR:
                items.append(made)
            elif known is not live:
                return _NO_TENSOR if live is _NO_LIVE else live
        tail = list(known[len(saved) :])
        if contains_tensor(tail):
            items += tail
        if type(saved) is tuple:
            same = type(live) is tuple and len(live) == len(items)
            return live if same and all(a is b for a, b in zip(items, live, strict=True)) else tuple(items)
        if type(live) is not list or id(live) in self._rewritten:
            return items
        self._rewritten.add(id(live))
        self._writes.append(lambda: live.__setitem__(slice(None), items))
        return live

    def _dict(self, saved: dict[Any, Any], live: Any) -> Any:
        known = live if isinstance(live, dict) else {}
        items = {}
        for key, item in saved.items():
            made = self._value(item, known.get(key, _NO_LIVE))
            if made is not _NO_TENSOR:
                items[key] = made
            elif known is not live:
                return _NO_TENSOR if live is _NO_LIVE else live
        items |= {key: item for key, item in known.items() if key not in saved and contains_tensor(item)}
        target = type(saved)()
        if type(live) is type(saved) and id(live) not in self._rewritten:
            self._rewritten.add(id(live))
            target = live

        def write() -> None:
            target.clear()
            for key, item in items.items():
                target[key] = item

        self._writes.append(write)
        return target
