"""Units: modules whose work depends on values, so that they are planned as one step with ways of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch


class Unit(Protocol):
    """What a module has beside `forward`, of the same inputs, to be planned without being looked into."""

    def placement_ways(self, *inputs: Any) -> list[UnitWay]:
        """Every way to run along one mesh axis."""

    def rehearse(self, *inputs: Any) -> torch.Tensor:
        """The result without its values."""

    def flops(self, *inputs: Any) -> int:
        """The work of forward and backward."""


def is_unit(module: object) -> TypeGuard[Unit]:
    """Whether a module says how it may be placed."""
    return all(callable(getattr(module, name, None)) for name in ("placement_ways", "rehearse", "flops"))


WHOLE, PARTIAL = -1, -2  # in addition to dims, which count from 0: replicated, and a partial sum over the ranks


@dataclass(frozen=True, slots=True)
class UnitWay:
    """A way to run a module with data-dependent work along one mesh axis: the sharded dims, WHOLE, or PARTIAL.

    `exchanged` is the volume of the module's own collectives in forward and backward, as a multiple of the rank's
    shard of its first input.
    """

    parameters: Mapping[str, int]
    inputs: tuple[int, ...]
    output: int
    exchanged: float = 0.0
