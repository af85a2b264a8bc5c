"""Tensors in nested lists, tuples and dicts: the arguments and results of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same structure with `change` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return _like(value, {key: map_tensors(item, change) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    return type(value)(map_tensors(item, change) for item in value) if isinstance(value, (list, tuple)) else value


def _like(like: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the given class: some models return dicts whose entries are attributes too."""
    if type(like) is dict:
        return items
    made = copy.copy(like)
    for key, item in items.items():
        made[key] = item
    return made


def map_first_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same structure with `change` applied to the first tensor."""
    done = False

    def once(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal done
        if done:
            return tensor
        done = True
        return change(tensor)

    return map_tensors(value, once)
