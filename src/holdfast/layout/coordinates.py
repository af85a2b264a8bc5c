"""Values that differ between ranks: the mesh axes that they depend on, and labels of coordinates (dp=1,tp=0)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.layout.placement import Mesh

RANK_AXIS = "rank"
UNNAMED_AXIS = "axis0"  # the first axis of a mesh without names


@dataclass(frozen=True, slots=True)
class CoordinateChange:
    """The labels of saved coordinates that no live rank has, and of live coordinates without a saved value."""

    left: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


def varying_axes(mesh: Mesh, digests: Sequence[str | None]) -> tuple[str, ...]:
    """Return the fewest mesh axes that a value depends on, given its digest on every rank.

    Ranks without the value (None) are ignored.
    """
    present = [(rank, digest) for rank, digest in enumerate(digests) if digest is not None]
    for count in range(len(mesh.axes) + 1):
        for chosen in itertools.combinations(range(len(mesh.axes)), count):
            seen: dict[tuple[int, ...], str] = {}
            coordinates = ((mesh.coordinate(rank) or (), digest) for rank, digest in present)
            if all(seen.setdefault(tuple(c[i] for i in chosen), digest) == digest for c, digest in coordinates):
                return tuple(mesh.axes[index] for index in chosen)
    raise AssertionError("two ranks of the mesh have the same coordinate")


def coordinate_on(mesh: Mesh, axes: Sequence[str], rank: int) -> tuple[int, ...] | None:
    """Return the coordinate of `rank` on the named axes, or None; every mesh has the axis "rank"."""
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


def own_label(mesh: Mesh, axes: Sequence[str], sizes: Sequence[int], rank: int, world: int) -> str | None:
    """Return the label of `rank` among values that were saved for `sizes` of the axes; None on another layout."""
    coordinate = coordinate_on(mesh, axes, rank)
    if coordinate is None or axis_sizes(mesh, axes, world) != tuple(sizes):
        return None
    return label(axes, coordinate)


def own_value(mesh: Mesh, entry: Mapping[str, Any], rank: int, world: int) -> tuple[Any, str] | None:
    """Return the encoded value of `rank` in an entry of state.json, and the label of its coordinate.

    The label is "" for a value that all ranks share. Return None on another layout.
    """
    if "value" in entry:
        return entry["value"], ""
    text = own_label(mesh, entry["axes"], entry["sizes"], rank, world)
    return None if text is None or text not in entry["values"] else (entry["values"][text], text)


def live_coordinate(mesh: Mesh, axes: Sequence[str], rank: int) -> tuple[int, ...]:
    """Return the coordinate of `rank` on the named axes; (rank,) on a mesh that lacks one of them."""
    coordinate = coordinate_on(mesh, axes, rank)
    return (rank,) if coordinate is None else coordinate


def coordinate_change(mesh: Mesh, entry: Mapping[str, Any], world: int) -> CoordinateChange:
    """Compare the coordinates of an entry of state.json with those of the live ranks."""
    axes, live_axes = tuple(entry["axes"]), tuple(entry["axes"])
    sizes = axis_sizes(mesh, axes, world)
    if not all(sizes):
        live_axes, sizes = (RANK_AXIS,), (world,)
    live, saved = set(itertools.product(*map(range, sizes))), set(map(parse_label, entry["values"]))
    return CoordinateChange(
        left=tuple(_shown(axes, coordinate) for coordinate in sorted(saved - live)),
        new=tuple(_shown(live_axes, coordinate) for coordinate in sorted(live - saved)),
    )


def _shown(axes: Sequence[str], coordinate: Sequence[int]) -> str:
    """Return a coordinate for people: on a mesh of one axis without a name, and on none, its place is its rank."""
    if tuple(axes) in ((RANK_AXIS,), (UNNAMED_AXIS,)):
        return f"rank {coordinate[0]}"
    return label(axes, coordinate)


def axis_sizes(mesh: Mesh, axes: Sequence[str], world: int) -> tuple[int, ...]:
    sizes = []
    for axis in axes:
        sizes.append(mesh.sizes[mesh.axes.index(axis)] if axis in mesh.axes else world if axis == RANK_AXIS else 0)
    return tuple(sizes)


def label(axes: Sequence[str], coordinate: Sequence[int]) -> str:
    """Return the form of a coordinate in keys and state.json: "dp=1,tp=0"."""
    return ",".join(f"{axis}={index}" for axis, index in zip(axes, coordinate, strict=True))


def parse_label(text: str) -> tuple[int, ...]:
    return tuple(int(part.rpartition("=")[2]) for part in text.split(","))


def key_at(key: str, coordinate_label: str) -> str:
    """Return the key of a tensor that differs between ranks, at one coordinate."""
    return f"{key}@{coordinate_label}" if coordinate_label else key
