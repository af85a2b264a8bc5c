"""`Unit`, the interface of modules whose work depends on values: planned as one step, by declared placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch

WHOLE, PARTIAL = -1, -2  # besides dims, which count from 0: replicated, and a partial sum over the ranks


@dataclass(frozen=True, slots=True)
class UnitWay:
    """A placement of a unit along one mesh axis: the sharded dims, WHOLE, or PARTIAL.

    `exchanged` is the volume of the module's own collectives in forward and backward, as a multiple of the rank's shard
    of its first input.
    """

    parameters: Mapping[str, int]
    inputs: tuple[int, ...]
    output: int
    exchanged: float = 0.0


class Unit(Protocol):
    """The methods of a unit besides `forward`, with the same inputs."""

    def placement_ways(self, *inputs: Any) -> list[UnitWay]:
        """Return every placement along one mesh axis."""

    def rehearse(self, *inputs: Any) -> torch.Tensor:
        """Return the result without its values."""

    def flops(self, *inputs: Any) -> int:
        """Return the operations of forward and backward."""


def is_unit(module: object) -> TypeGuard[Unit]:
    """Return True if a module declares how it may be placed."""
    return all(callable(getattr(module, name, None)) for name in ("placement_ways", "rehearse", "flops"))
