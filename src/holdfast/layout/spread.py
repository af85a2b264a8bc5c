"""Spreads: who holds which boxes of a tensor, in a form that does not grow with its tensors or ranks.

Ranks of one mesh describe a tensor alike, by mesh and placements; the boxes follow from the
shape when they are needed. A thousand tensors held alike share one spread.
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
from holdfast.layout.placement import Placement, Replicate, Shard, StridedShard, parts_of


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank holds all of the tensor."""

    def boxes(self, shape: tuple[int, ...], ranks: Sequence[int]) -> Iterator[tuple[int, Box]]:
        for rank in ranks:
            yield rank, Box.full(shape)


@dataclass(frozen=True, slots=True)
class Boxes:
    """A rank holds just these boxes."""

    held: tuple[Box, ...]

    def boxes(self, shape: tuple[int, ...], ranks: Sequence[int]) -> Iterator[tuple[int, Box]]:
        for rank in ranks:
            for box in self.held:
                yield rank, box


@dataclass(frozen=True, slots=True)
class OnMesh:
    """A rank holds what the placements give it at its coordinate."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    right_to_left: bool = True

    def boxes(self, shape: tuple[int, ...], ranks: Sequence[int]) -> Iterator[tuple[int, Box]]:
        wanted = set(ranks)
        coordinates = itertools.product(*map(range, self.mesh.sizes))
        for rank, coordinate in zip(self.mesh.ranks, coordinates, strict=True):
            if rank in wanted:
                parts = parts_of(shape, self.mesh.sizes, self.placements, coordinate, right_to_left=self.right_to_left)
                yield from ((rank, part.box) for part in parts)


How = Whole | Boxes | OnMesh


class Spread:
    """Ranks by how they hold a tensor. Compared by identity: `Spreads` makes each one once."""

    __slots__ = ("__dict__", "members")

    def __init__(self, members: tuple[tuple[How, tuple[int, ...]], ...]) -> None:
        self.members = members

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for _, ranks in self.members for rank in ranks)

    def boxes(self, shape: tuple[int, ...]) -> list[tuple[int, Box]]:
        """Every rank's boxes, ranks in order."""
        found = [held for how, ranks in self.members for held in how.boxes(shape, ranks)]
        return sorted(found, key=lambda held: held[0])


class Spreads:
    """Makes one spread for all tensors that are held alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[How, tuple[int, ...]], ...], Spread] = {}

    def of(self, members: Sequence[tuple[How, tuple[int, ...]]]) -> Spread:
        key = tuple(members)
        if key not in self._known:
            self._known[key] = Spread(key)
        return self._known[key]


def how_fields(how: How, meshes: list[Mesh]) -> list[Any]:
    """A JSON form; meshes are put into `meshes` once and named by number."""
    if isinstance(how, Whole):
        return []
    if isinstance(how, Boxes):
        return [[[*box.offsets, *box.sizes] for box in how.held]]
    if how.mesh not in meshes:
        meshes.append(how.mesh)
    return [meshes.index(how.mesh), [_placement_text(p) for p in how.placements], how.right_to_left]


def how_from(fields: Sequence[Any], meshes: Sequence[Mesh]) -> How:
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
        raise LayoutError(f"the unknown placement {text!r}")
    dim, factor = text[1:].split(":")
    return StridedShard(int(dim), int(factor))
