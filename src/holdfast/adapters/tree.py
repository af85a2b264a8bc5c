"""Trees of values: tensors and arrays are taken out under dotted keys, the rest becomes JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.core.errors import Unsupported
from holdfast.format import statejson

_SCALARS = frozenset({int, float, str, bool, type(None)})  # most of what large values are made of


@dataclass(frozen=True, slots=True)
class Tree:
    """A value as JSON with references, and what the references name."""

    value: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def contains_tensor(value: Any) -> bool:
    """Whether a value is a tensor or a tree of lists and dicts with one in it."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor | np.ndarray):
            return True
        if isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            members = item.values() if isinstance(item, dict) else item
            waiting += [member for member in members if type(member) not in _SCALARS]
    return False


def flatten(name: str, value: Any) -> Tree:
    """Take the tensors out of a value; keys are its path below `name`."""
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
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError:
        raise Unsupported(f"{path}: a numpy array of dtype {array.dtype} cannot be stored") from None


def unflatten(value: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """The value again, with `tensors` where the references stand."""

    def make(tag: str, content: Any) -> Any:
        if tag == "$tensor" and content in tensors:
            return tensors[content]
        if tag == "$array" and content in tensors:
            return tensors[content].numpy()
        raise Unsupported(f"{where}: the unknown tag {tag[:40]!r}")

    return statejson.decode(value, where, make)
