"""Values that differ between ranks: kept by the mesh axes they depend on, and found again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from holdfast.layout.mesh import Mesh

RANK_AXIS = "rank"


def varying_axes(mesh: Mesh, digests: Sequence[str | None]) -> tuple[str, ...]:
    """The fewest axes of the mesh on which a value depends, given every rank's digest of it.

    Ranks that do not have the value (None) do not count.
    """
    present = [(rank, digest) for rank, digest in enumerate(digests) if digest is not None]
    for count in range(len(mesh.axes) + 1):
        for chosen in itertools.combinations(range(len(mesh.axes)), count):
            seen: dict[tuple[int, ...], str] = {}
            coordinates = ((mesh.coordinate(rank) or (), digest) for rank, digest in present)
            if all(seen.setdefault(tuple(c[i] for i in chosen), digest) == digest for c, digest in coordinates):
                return tuple(mesh.axes[index] for index in chosen)
    raise AssertionError("a mesh with all ranks tells every rank apart")


def coordinate_on(mesh: Mesh, axes: Sequence[str], rank: int) -> tuple[int, ...] | None:
    """Where `rank` stands on the named axes; every mesh has the axis "rank"."""
    coordinate = mesh.coordinate(rank)
    out = []
    for axis in axes:
        if axis in mesh.axes and coordinate is not None:
            out.append(coordinate[mesh.axes.index(axis)])
        elif axis == RANK_AXIS:
            out.append(rank)
        else:
            return None
    return tuple(out)


def axis_sizes(mesh: Mesh, axes: Sequence[str], world: int) -> tuple[int, ...]:
    sizes = []
    for axis in axes:
        sizes.append(mesh.sizes[mesh.axes.index(axis)] if axis in mesh.axes else world if axis == RANK_AXIS else 0)
    return tuple(sizes)


def label(axes: Sequence[str], coordinate: Sequence[int]) -> str:
    """How a coordinate is written in keys and in state.json: "dp=1,tp=0"."""
    return ",".join(f"{axis}={index}" for axis, index in zip(axes, coordinate, strict=True))


def parse_label(text: str) -> tuple[int, ...]:
    return tuple(int(part.rpartition("=")[2]) for part in text.split(","))


def key_at(key: str, coordinate_label: str) -> str:
    """The key of a tensor that differs between ranks, at one coordinate."""
    return f"{key}@{coordinate_label}" if coordinate_label else key
