"""Meshes: ranks arranged along named axes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in row-major order over axes; the last axis changes fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or math.prod(self.sizes) != len(self.ranks):
            raise ValueError(f"a mesh of axes {self.axes} and sizes {self.sizes} cannot hold {len(self.ranks)} ranks")

    @staticmethod
    def line(world: int, axis: str = "rank") -> Mesh:
        """All ranks along one axis."""
        return Mesh((axis,), (world,), tuple(range(world)))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where `rank` stands on each axis, or None if the mesh does not have it."""
        if rank not in self.ranks:
            return None
        position = self.ranks.index(rank)
        coordinate = []
        for size in reversed(self.sizes):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))
