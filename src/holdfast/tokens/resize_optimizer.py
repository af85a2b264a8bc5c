"""An optimizer of a model whose vocabulary grows: it holds the new parameters, and states with rows for new tokens."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.adapters.optimizer import inner_optimizer, is_master
from holdfast.core.errors import Unsupported
from holdfast.tokens.resize_tensor import placed_like, whole_of, with_rows


def check_states(optimizer: Any, old: torch.Tensor, key: str) -> None:
    """Raise Unsupported for states of a parameter that cannot get rows for new tokens."""
    inner = inner_optimizer(optimizer)
    if inner is not optimizer:
        raise Unsupported(f"tokens cannot be added below a {type(optimizer).__name__}: make it anew, after them")
    for name, value in inner.state.get(old, {}).items():
        if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) != tuple(old.shape):
            raise Unsupported(
                f"{type(inner).__name__} keeps {name} of {key} with the shape {list(value.shape)}, not that of the "
                "parameter: add the tokens before the first step"
            )


def replace_parameter(optimizer: Any, old: torch.Tensor, new: torch.Tensor, whole: torch.Tensor) -> None:
    """Replace a parameter in an optimizer. New rows of its states are zero, those of a master the parameter's.

    Collective if the states are DTensors.
    """
    for group in optimizer.param_groups:
        group["params"] = [new if param is old else param for param in group["params"]]
    if old not in optimizer.state:
        return
    states = optimizer.state.pop(old)
    rows, before = whole.shape[0], old.shape[0]
    for name, value in states.items():
        if isinstance(value, torch.Tensor) and value.dim():
            grown = with_rows(whole_of(value), rows)
            if is_master(name):
                grown[before:] = whole[before:].to(grown.dtype)
            states[name] = placed_like(grown, new if type(value) is type(new.data) else value)
    optimizer.state[new] = states
