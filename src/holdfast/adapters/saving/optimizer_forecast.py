"""The tensors that an optimizer's step changes, and a forecast of those that its first step will add."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from holdfast.adapters.optimizer import inner_optimizer
from holdfast.adapters.subclass_tensors import plain_tensors

# Number of parameter-sized state tensors that each torch optimizer keeps.
_TENSORS = {"SGD": 0, "Adagrad": 1, "Adadelta": 2, "RMSprop": 1, "Rprop": 2, "ASGD": 1, "Muon": 1, "Adafactor": 0}
_UNKNOWN = 2


def params_of(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in inner_optimizer(optimizer).param_groups:
        yield from group["params"]


def stepped_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the local tensors that a step changes: parameters and their state."""
    inner = inner_optimizer(optimizer)
    for param in params_of(optimizer):
        if not param.requires_grad:
            continue  # a step leaves it unchanged; other code may update it, such as a key encoder or a router's bias
        yield from plain_tensors(param)
        for value in inner.state.get(param, {}).values():
            if isinstance(value, torch.Tensor):
                yield from plain_tensors(value)


def missing_state_tensors(optimizer: Any) -> int:
    """Return how many parameter-sized tensors the first step will add per parameter; 0 if the state exists."""
    inner = inner_optimizer(optimizer)
    if not isinstance(inner, torch.optim.Optimizer) or len(inner.state):
        return 0
    options = inner.param_groups[0] if inner.param_groups else {}
    count = _TENSORS.get(type(inner).__name__, _UNKNOWN)
    return count + bool(options.get("amsgrad")) + bool(options.get("momentum")) + bool(options.get("centered"))
