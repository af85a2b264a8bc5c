"""Words by which a module tells how it may be placed over ranks, for planners that do not look inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WHOLE, PARTIAL = -1, -2  # beside the dims, which count from 0: on every rank, and a sum over the ranks


@dataclass(frozen=True, slots=True)
class UnitWay:
    """How a module whose work depends on values runs along one mesh axis: the sharded dims, WHOLE, or PARTIAL.

    `exchanged` is what goes through the module's own collectives in forward and backward together, as a multiple of
    the rank's part of its first input.
    """

    parameters: Mapping[str, int]
    inputs: tuple[int, ...]
    output: int
    exchanged: float = 0.0
