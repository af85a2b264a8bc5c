"""Meshes: ranks arranged along named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_TP_AXES = frozenset({"tp", "mp", "tensor", "tensor_parallel", "model_parallel"})
_OTHER_AXES = frozenset(
    {"dp", "ddp", "fsdp", "hsdp", "replicate", "shard", "dp_replicate", "dp_shard", "dp_shard_cp", "dp_cp", "data"}
    | {"pp", "pipe", "pipeline", "stage", "cp", "context", "sp", "seq", "ep", "expert", "etp", "sharding", "zero"}
)


def tp_degree_of(sizes: Mapping[str, int]) -> int | None:
    """Return the size of a mesh's tensor-parallel axis by name; None if unknown axis names leave it undecided."""
    found = [size for axis, size in sizes.items() if axis.lower() in _TP_AXES]
    if found:
        return found[0]
    open_axes = [axis for axis, size in sizes.items() if size > 1 and axis.lower() not in _OTHER_AXES]
    return None if open_axes else 1


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
        """Return a mesh of all ranks along one axis."""
        return Mesh((axis,), (world,), tuple(range(world)))

    @property
    def tp_degree(self) -> int | None:
        """The size of the tensor-parallel axis; None if unknown axis names leave it undecided."""
        return tp_degree_of(dict(zip(self.axes, self.sizes, strict=True)))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of `rank`, or None if the mesh does not have the rank."""
        if rank not in self.ranks:
            return None
        position = self.ranks.index(rank)
        coordinate = []
        for size in reversed(self.sizes):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))
