"""The [schedule] settings: the learning rate as a pure function of the step, with no state to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument

_KINDS = ("cosine", "linear", "constant")


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Linear warm-up over `warmup_steps`, then decay to the fraction `floor` of the peak at the last step.

    kind: "cosine", "linear" or "constant". `steps` is the last step; 0 means the length of the run.
    """

    kind: str = "cosine"
    warmup_steps: int = 0
    steps: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise InvalidArgument(f"schedule.kind={self.kind!r}: choose one of {', '.join(_KINDS)}")
        if not 0.0 <= self.floor <= 1.0:
            raise InvalidArgument(f"schedule.floor={self.floor!r} must be a fraction of the peak, from 0 to 1")
        if self.warmup_steps < 0 or self.steps < 0:
            raise InvalidArgument("schedule.warmup_steps and schedule.steps must be at least 0")


def learning_rate_share(config: ScheduleConfig, step: int, run_steps: int) -> float:
    """Return the fraction of the peak learning rate for optimizer step `step`; the first step is 1.

    The first warm-up step is above 0, and the last one is at the peak. After the end the floor remains.
    """
    if step < 1:
        raise InvalidArgument(f"step={step}: the first optimizer step is 1")
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    begin, end = max(1, config.warmup_steps), config.steps or run_steps
    progress = 1.0 if step >= end else (step - begin) / (end - begin)
    height = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.kind == "cosine" else 1.0 - progress
    return config.floor + (1.0 - config.floor) * height
