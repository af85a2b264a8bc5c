"""Small helpers of tests that compare DTensors with one device, on the ranks themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def gap(found: Any, expected: Any) -> float:
    """The largest difference; infinite where shapes or dtypes differ."""
    found, expected = whole(found), whole(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.numel():
        return 0.0
    return float((found.detach().double() - expected.detach().double()).abs().max())


def worst(found: Any, expected: Any) -> float:
    return max(gap(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


class Findings:
    """What went wrong, by name: an error's words, or a gap above the tolerance."""

    def __init__(self) -> None:
        self.bad: dict[str, str] = {}
        self.count = 0

    def check(self, name: str, act: Callable[[], float], tolerance: float = 1e-9) -> None:
        self.count += 1
        try:
            difference = act()
        except Exception as error:  # noqa: BLE001 - any error is a finding
            self.bad[name] = f"{type(error).__name__}: {error}"
            return
        if not difference <= tolerance:
            self.bad[name] = f"off by {difference:.3g}"


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
