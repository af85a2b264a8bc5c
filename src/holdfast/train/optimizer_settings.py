"""The [optimizer] settings of AdamW, the learning rate of a step, and options kept over a restore."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW. `clip` is the maximum gradient norm; 0 disables clipping."""

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise InvalidArgument(f"optimizer.lr={self.lr!r} must be positive")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise InvalidArgument(
                f"optimizer.beta1={self.beta1!r} and beta2={self.beta2!r} must be at least 0 and less than 1"
            )
        if self.eps < 0 or self.weight_decay < 0 or self.clip < 0:
            raise InvalidArgument("optimizer.eps, weight_decay and clip must be at least 0")

    def options(self) -> dict[str, Any]:
        """Return the arguments of torch.optim.AdamW."""
        betas = (self.beta1, self.beta2)
        return {"lr": self.lr, "betas": betas, "eps": self.eps, "weight_decay": self.weight_decay}


@contextmanager
def keep_options(optimizer: Any) -> Iterator[None]:
    """Reset the options to their current values on exit, so that a restore does not override the config."""
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    yield
    for group, options in zip(optimizer.param_groups, before, strict=True):
        group.update(options)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of every group; the schedule is a function of the step, not of restored state."""
    for group in optimizer.param_groups:
        group["lr"] = rate
