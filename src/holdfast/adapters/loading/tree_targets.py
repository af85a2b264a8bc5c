"""Load into trees: tensors and arrays are filled in place, every other value is replaced by the saved one.

After a load the live tree equals the saved tree. Tensors, arrays, dicts and lists keep their identity
if the saved tree has the same kind of value at the same path, so that references in the program stay valid.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from holdfast.adapters.live_types import (
    NO_LIVE,
    has_class,
    keep_typed,
    make_typed,
    members,
    set_fields,
    type_mismatch,
)
from holdfast.adapters.tensors import array_overlaps
from holdfast.adapters.tree import contains_tensor, native_dtype
from holdfast.core.errors import Unsupported
from holdfast.format import statejson
from holdfast.format.typed_values import TypedValue

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
    """Decode a saved tree, with a `Reference` in place of each tensor and array; classes are left open."""

    def refer(tag: str, content: Any) -> Reference:
        if tag not in ("$tensor", "$array") or not isinstance(content, str):
            raise Unsupported(f"{where}: unknown tag {tag[:40]!r}")
        return Reference(tag, content)

    return statejson.decode(value, where, refer, keep_typed)


def replaced_tensors(saved: Any, live: Any) -> Iterator[tuple[str, Any]]:
    """Yield the key of each saved tensor or array whose live value is not a tensor or array, with that value."""
    if isinstance(saved, Reference):
        if not isinstance(live, torch.Tensor | np.ndarray):
            yield saved.key, live
        return
    for _, item, other in members(saved, live):
        if other is not NO_LIVE:
            yield from replaced_tensors(item, other)


def has_plain_values(saved: Any) -> bool:
    """Return True if a saved tree has values other than tensors, arrays and containers."""
    if isinstance(saved, dict | list | tuple | deque) or (isinstance(saved, TypedValue) and not saved.is_leaf):
        return any(has_plain_values(item) for _, item, _ in members(saved, NO_LIVE))
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
        if isinstance(saved, TypedValue):
            return self._typed(saved, live)
        if type(saved) in (list, tuple, deque):
            return self._sequence(saved, live)
        if isinstance(saved, dict):
            return self._dict(saved, live)
        return saved

    def _typed(self, saved: TypedValue, live: Any) -> Any:
        if saved.tag != "$dataclass" and type_mismatch(saved, live):
            return live  # reported as a mismatch; of a dataclass the common fields are set
        if type(live) is defaultdict and saved.tag == "$defaultdict":
            return self._dict(defaultdict(live.default_factory, saved.items), live)
        items = {}
        for key, item, other in members(saved, live):
            items[key] = self._value(item, other)
            if items[key] is _NO_TENSOR:
                return _NO_TENSOR if live is NO_LIVE else live
        is_live = saved.tag == "$dataclass" and has_class(saved, live) and id(live) not in self._rewritten
        if not is_live or type(live).__dataclass_params__.frozen:
            return make_typed(saved, live, items)
        self._rewritten.add(id(live))
        self._writes.append(lambda: set_fields(live, items))
        return live

    def _leaf(self, saved: Reference, live: Any) -> Any:
        leaf = self.leaves.get(saved.key)
        if leaf is not None and leaf.live is live and saved.key in self.filled:
            return leaf.finish()
        return _NO_TENSOR if live is NO_LIVE else live

    def _sequence(self, saved: list[Any] | tuple[Any, ...] | deque[Any], live: Any) -> Any:
        known = tuple(live) if isinstance(live, list | tuple | deque) else ()
        items = []
        for index, item in enumerate(saved):
            made = self._value(item, known[index] if index < len(known) else NO_LIVE)
            if made is not _NO_TENSOR:
                items.append(made)
            elif not isinstance(live, list | tuple | deque):
                return _NO_TENSOR if live is NO_LIVE else live
        tail = list(known[len(saved) :])
        if contains_tensor(tail):
            items += tail
        if type(saved) is tuple:
            same = type(live) is tuple and len(live) == len(items)
            return live if same and all(a is b for a, b in zip(items, live, strict=True)) else tuple(items)
        longest = saved.maxlen if isinstance(saved, deque) else None
        same = type(live) is type(saved) and getattr(live, "maxlen", None) == longest
        if not same or id(live) in self._rewritten:
            return deque(items, longest) if isinstance(saved, deque) else items
        self._rewritten.add(id(live))

        def write() -> None:
            live.clear()
            live.extend(items)

        self._writes.append(write)
        return live

    def _dict(self, saved: dict[Any, Any], live: Any) -> Any:
        known = live if isinstance(live, dict) else {}
        items = {}
        for key, item, other in members(saved, known):
            made = self._value(item, other)
            if made is not _NO_TENSOR:
                items[key] = made
            elif known is not live:
                return _NO_TENSOR if live is NO_LIVE else live
        items |= {key: item for key, item in known.items() if key not in items and contains_tensor(item)}
        target = defaultdict(saved.default_factory) if isinstance(saved, defaultdict) else type(saved)()
        if type(live) is type(saved) and id(live) not in self._rewritten:
            self._rewritten.add(id(live))
            target = live

        def write() -> None:
            target.clear()
            for key, item in items.items():
                target[key] = item

        self._writes.append(write)
        return target
