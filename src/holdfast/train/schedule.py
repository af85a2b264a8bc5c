"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument

_KINDS = ("cosine", "linear", "constant")


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How the learning rate goes: up over `warmup_steps`, then down to `floor` of its peak at the last step.

    kind: "cosine", "linear" or "constant". `steps` is where it ends, the length of the run if 0.
    """

    kind: str = "cosine"
    warmup_steps: int = 0
    steps: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InvalidArgument(f"schedule.kind={self.kind!r}: choose one of {', '.join(_KINDS)}")
        if not 0.0 <= self.floor <= 1.0:
            raise InvalidArgument(f"schedule.floor={self.floor!r}: give a share of the peak, from 0 to 1")
        if self.warmup_steps < 0 or self.steps < 0:
            raise InvalidArgument("schedule.warmup_steps and schedule.steps are whole numbers from 0 on")


def learning_rate_share(config: ScheduleConfig, step: int, run_steps: int) -> float:
    """The share of the peak learning rate at which optimizer step `step` is made; the first step is 1.

    The first step of a warm-up is above 0, its last is the peak; after the end the floor stays.
    """
    if step < 1:
        raise InvalidArgument(f"step={step}: the first optimizer step is 1")
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    begin, end = max(1, config.warmup_steps), config.steps or run_steps
    way = 1.0 if step >= end else (step - begin) / (end - begin)
    height = 0.5 * (1.0 + math.cos(math.pi * way)) if config.kind == "cosine" else 1.0 - way
    return config.floor + (1.0 - config.floor) * height
