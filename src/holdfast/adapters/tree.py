"""Trees of values: tensors and arrays are taken out under dotted keys, the rest becomes JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from holdfast.core.errors import Unsupported
from holdfast.format import statejson


@dataclass(frozen=True, slots=True)
class Tree:
    """A value as JSON with references, and what the references name."""

    value: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


_PLAIN = frozenset({str, int, float, bool, type(None), bytes})


def contains_tensor(value: Any, name: str | None = None) -> bool:
    """Whether a value is a tensor or a tree of lists and dicts with one in it.

    With a `name`, raises Unsupported for an object with a state_dict that is found on the way: only at the
    top of a state are objects saved and loaded.
    """
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if type(item) in _PLAIN:
            continue
        if isinstance(item, torch.Tensor | np.ndarray):
            return True
        if isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            members = item.values() if isinstance(item, dict) else item
            waiting += [member for member in members if type(member) not in _PLAIN]
        elif name is not None and callable(getattr(item, "state_dict", None)):
            kind = type(item)
            raise Unsupported(
                f"{name}: a {kind.__module__}.{kind.__qualname__} inside of a {type(value).__name__} is neither saved "
                "nor loaded as an object; give it a name of its own at the top of the state"
            )
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
    return torch.from_numpy(np.array(array, dtype=native_dtype(array, path), order="C"))


def native_dtype(array: np.ndarray[Any, Any], path: str) -> np.dtype[Any]:
    """The dtype in which an array is stored: its own, in the byte order of this machine.

    Raises Unsupported for a dtype that torch does not have, and for a subclass of ndarray: its mask,
    fields or type would be lost.
    """
    if type(array) not in (np.ndarray, np.memmap):
        kind = type(array)
        raise Unsupported(
            f"{path}: a {kind.__module__}.{kind.__qualname__} would come back as a plain numpy array; "
            "store its parts as plain arrays"
        )
    dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
    if dtype.kind in "biufc":  # torch names what it has; text, objects, records and times it does not
        try:
            torch.from_numpy(np.empty(0, dtype))
        except TypeError:
            pass  # refused below, by the same sentence
        else:
            return dtype
    raise Unsupported(f"{path}: a numpy array of dtype {array.dtype} cannot be stored")


def unflatten(value: Any, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """The value again, with `tensors` where the references stand."""

    def make(tag: str, content: Any) -> Any:
        if tag == "$tensor" and content in tensors:
            return tensors[content]
        if tag == "$array" and content in tensors:
            return tensors[content].numpy()
        raise Unsupported(f"{where}: the unknown tag {tag[:40]!r}")

    return statejson.decode(value, where, make)
