"""Forecasts: how much state an optimizer will have once it has stepped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.adapters.optimizer import inner_optimizer

# Tensors as large as the parameter that each kind of torch optimizer keeps.
_TENSORS = {"SGD": 0, "Adagrad": 1, "Adadelta": 2, "RMSprop": 1, "Rprop": 2, "ASGD": 1, "Muon": 1, "Adafactor": 0}
_UNKNOWN = 2


def params_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in inner_optimizer(optimizer).param_groups:
        yield from group["params"]


def stepped_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The local tensors that a step changes: parameters and their state."""
    inner = inner_optimizer(optimizer)
    for param in params_of(optimizer):
        if not param.requires_grad:
            continue  # no step changes it, but something else may: a key encoder, a router's bias
        yield local_tensor(param)
        for value in inner.state.get(param, {}).values():
            if isinstance(value, torch.Tensor):
                yield local_tensor(value)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def coming_tensors(optimizer: Any) -> int:
    """How many tensors like each parameter will join the state with the first step; 0 if they are there."""
    inner = inner_optimizer(optimizer)
    if not isinstance(inner, torch.optim.Optimizer) or len(inner.state):
        return 0
    options = inner.param_groups[0] if inner.param_groups else {}
    count = _TENSORS.get(type(inner).__name__, _UNKNOWN)
    return count + bool(options.get("amsgrad")) + bool(options.get("momentum")) + bool(options.get("centered"))
