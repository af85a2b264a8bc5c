"""Trees of values: extract tensors and arrays under dotted keys, turn the rest into JSON, and rebuild the tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.adapters.live_types import NO_LIVE, keep_typed, with_live_types
from holdfast.core.errors import Unsupported
from holdfast.format import statejson
from holdfast.format.typed_values import is_dataclass_object, set_fields_of


@dataclass(frozen=True, slots=True)
class Tree:
    """A value as JSON with references, and the referenced tensors by key."""

    value: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


_PLAIN = frozenset({str, int, float, bool, type(None), bytes})


def contains_tensor(value: Any, name: str | None = None) -> bool:
    """Return True if a value is a tensor or a tree of lists, dicts and dataclasses that contains a tensor.

    With a `name`, raises Unsupported for a nested object with a state_dict: objects are saved and loaded
    only at the top level of a state.
    """
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if type(item) in _PLAIN:
            continue
        if isinstance(item, torch.Tensor | np.ndarray):
            return True
        if isinstance(item, dict | list | tuple | deque) and id(item) not in seen:
            seen.add(id(item))
            members = item.values() if isinstance(item, dict) else item
            waiting += [member for member in members if type(member) not in _PLAIN]
        elif is_dataclass_object(item) and not hasattr(item, "state_dict") and id(item) not in seen:
            seen.add(id(item))
            waiting += set_fields_of(item).values()
        elif name is not None and callable(getattr(item, "state_dict", None)):
            kind = type(item)
            raise Unsupported(
                f"{name}: a {kind.__module__}.{kind.__qualname__} inside a {type(value).__name__} cannot be saved or "
                "loaded as an object; give it its own name at the top level of the state"
            )
    return False


def flatten(name: str, value: Any) -> Tree:
    """Extract the tensors of a value; keys are their paths below `name`."""
    tree = Tree(None)

    def claim(leaf: Any, path: str, keys: statejson.Keys) -> Any:
        if isinstance(leaf, np.ndarray):
            tensor, tag = _from_numpy(leaf, path), "$array"
        elif isinstance(leaf, torch.Tensor):
            tensor, tag = leaf, "$tensor"
        else:
            return None
        key = ".".join(map(str, keys)) if keys else name
        if key in tree.tensors:
            raise Unsupported(f"{path}: two tensors of {name!r} have the key {key!r}")
        tree.tensors[key] = tensor
        return {tag: key}

    return Tree(statejson.encode(value, name, claim), tree.tensors)


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=native_dtype(array, path), order="C"))


def native_dtype(array: np.ndarray[Any, Any], path: str) -> np.dtype[Any]:
    """Return the dtype in which an array is stored: its own dtype in native byte order.

    Raises Unsupported for a dtype that torch lacks, and for a subclass of ndarray, whose mask, fields or
    type would be lost.
    """
    if type(array) not in (np.ndarray, np.memmap):
        kind = type(array)
        raise Unsupported(
            f"{path}: a {kind.__module__}.{kind.__qualname__} would be loaded as a plain numpy array; "
            "store its components as plain arrays"
        )
    dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
    if dtype.kind in "biufc":  # torch has no strings, objects, records or times
        try:
            torch.from_numpy(np.empty(0, dtype))
        except TypeError:
            pass  # raised below, with the same message
        else:
            return dtype
    raise Unsupported(f"{path}: a numpy array of dtype {array.dtype} cannot be stored")


def unflatten(value: Any, tensors: Mapping[str, torch.Tensor], where: str, live: Any = NO_LIVE) -> Any:
    """Rebuild a value, with `tensors` in place of the references and the classes of the `live` value."""
    return with_live_types(decode_tensors(value, tensors, where), live)


def decode_tensors(value: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """Decode a value, with `tensors` in place of the references; classes are left open."""

    def make(tag: str, content: Any) -> Any:
        if tag == "$tensor" and content in tensors:
            return tensors[content]
        if tag == "$array" and content in tensors:
            return tensors[content].numpy()
        raise Unsupported(f"{where}: unknown tag {tag[:40]!r}")

    return statejson.decode(value, where, make, keep_typed)
