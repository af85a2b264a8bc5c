"""Declarations of how a module may be sharded over ranks, for planners that do not look inside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
