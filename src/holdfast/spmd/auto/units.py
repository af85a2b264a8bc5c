"""Units: modules whose work depends on values, so that they are planned as one step with ways of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from holdfast.spmd.auto.flows import PARTIAL, WHOLE

__all__ = ["PARTIAL", "WHOLE", "UnitWay", "is_unit"]


@dataclass(frozen=True, slots=True)
class UnitWay:
    """How a unit runs along one mesh axis. Numbers are dims, or WHOLE, or for the output PARTIAL.

    `exchanged` is what goes through the unit's own collectives in forward and backward together, as a multiple of
    the rank's part of its first input.
    """

    parameters: Mapping[str, int]
    inputs: tuple[int, ...]
    output: int
    exchanged: float = 0.0


def is_unit(module: nn.Module | Any) -> bool:
    """Whether a module says how it may be placed: `placement_ways`, `rehearse` and `flops`, of its forward's inputs."""
    return all(callable(getattr(module, name, None)) for name in ("placement_ways", "rehearse", "flops"))
