"""Spreads: the boxes of a tensor that each rank holds, in a form that does not grow with tensors or ranks.

The ranks of a mesh describe a tensor by mesh and placements; the boxes follow from the shape when
they are needed. A thousand tensors with the same layout share one spread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.core.errors import LayoutError
from holdfast.layout.box import Box
from holdfast.layout.mesh import Mesh
from holdfast.layout.placement import Placement, Replicate, Shard, StridedShard, shard_boxes


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank holds the whole tensor."""

    def boxes(self, shape: tuple[int, ...], ranks: Sequence[int]) -> Iterator[tuple[int, Box]]:
        for rank in ranks:
            yield rank, Box.full(shape)


@dataclass(frozen=True, slots=True)
class Boxes:
    """A rank holds exactly these boxes."""

    held: tuple[Box, ...]

    def boxes(self, shape: tuple[int, ...], ranks: Sequence[int]) -> Iterator[tuple[int, Box]]:
        for rank in ranks:
            for box in self.held:
                yield rank, box


@dataclass(frozen=True, slots=True)
class OnMesh:
    """A rank holds the boxes that the placements give to its coordinate."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    right_to_left: bool = True

    def boxes(self, shape: tuple[int, ...], ranks: Sequence[int]) -> Iterator[tuple[int, Box]]:
        wanted = set(ranks)
        coordinates = itertools.product(*map(range, self.mesh.sizes))
        for rank, coordinate in zip(self.mesh.ranks, coordinates, strict=True):
            if rank in wanted:
                parts = shard_boxes(
                    shape, self.mesh.sizes, self.placements, coordinate, right_to_left=self.right_to_left
                )
                yield from ((rank, part.box) for part in parts)


RankLayout = Whole | Boxes | OnMesh


class Spread:
    """Ranks grouped by their layout of a tensor. Compared by identity: `Spreads` makes each spread once."""

    __slots__ = ("__dict__", "members")

    def __init__(self, members: tuple[tuple[RankLayout, tuple[int, ...]], ...]) -> None:
        self.members = members

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for _, ranks in self.members for rank in ranks)

    def boxes(self, shape: tuple[int, ...]) -> list[tuple[int, Box]]:
        """Return the boxes of every rank, in rank order."""
        found = [held for layout, ranks in self.members for held in layout.boxes(shape, ranks)]
        return sorted(found, key=lambda held: held[0])


class Spreads:
    """Makes one spread for all tensors with the same layout."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[RankLayout, tuple[int, ...]], ...], Spread] = {}

    def of(self, members: Sequence[tuple[RankLayout, tuple[int, ...]]]) -> Spread:
        key = tuple(members)
        if key not in self._known:
            self._known[key] = Spread(key)
        return self._known[key]


def layout_fields(layout: RankLayout, meshes: list[Mesh]) -> list[Any]:
    """Return a JSON form; each mesh is added to `meshes` once and referred to by index."""
    if isinstance(layout, Whole):
        return []
    if isinstance(layout, Boxes):
        return [[[*box.offsets, *box.sizes] for box in layout.held]]
    if layout.mesh not in meshes:
        meshes.append(layout.mesh)
    return [meshes.index(layout.mesh), [_placement_text(p) for p in layout.placements], layout.right_to_left]


def layout_from_fields(fields: Sequence[Any], meshes: Sequence[Mesh]) -> RankLayout:
    if not fields:
        return Whole()
    if len(fields) == 1:
        held = (Box(tuple(box[: len(box) // 2]), tuple(box[len(box) // 2 :])) for box in fields[0])
        return Boxes(tuple(held))
    number, placements, right_to_left = fields
    return OnMesh(meshes[number], tuple(map(_placement_from, placements)), bool(right_to_left))


def _placement_text(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return f"T{placement.dim}:{placement.split_factor}"


def _placement_from(text: str) -> Placement:
    if text == "R":
        return Replicate()
    if text[0] == "S":
        return Shard(int(text[1:]))
    if text[0] != "T":
        raise LayoutError(f"unknown placement {text!r}")
    dim, factor = text[1:].split(":")
    return StridedShard(int(dim), int(factor))
