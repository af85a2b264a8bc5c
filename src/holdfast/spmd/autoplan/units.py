"""Units: modules whose work depends on values, so that they are planned as one step with ways of their own."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch

from holdfast.spmd.autoplan.placing import UnitWay


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
