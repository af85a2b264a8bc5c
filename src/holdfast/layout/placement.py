"""Meshes and placements: the boxes that each rank holds of a sharded tensor, spreads over ranks, JSON, TP degree.

The semantics are those of DTensor: a dim is split like `torch.chunk`, so the last ranks of an axis
may hold less, or nothing. A spread describes the shards of all ranks by mesh and placements, and
does not grow with tensors or ranks: the boxes follow from the shape when they are needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from holdfast.core.errors import LayoutError
from holdfast.layout.box import Box

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


IndexRange = tuple[int, int]  # first index and count along one dim


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same data."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis splits `dim` into as many chunks as it has ranks."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis splits each of the `split_factor` chunks of `dim` that axes to its right have made.

    FSDP2 on top of tensor parallelism shards its parameters this way: tensor parallelism splits first.
    """

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard


@dataclass(frozen=True, slots=True)
class ShardBox:
    """A box of the whole tensor, and its position in the rank's local array."""

    box: Box
    local: Box


def chunk(ranges: Sequence[IndexRange], count: int, index: int) -> list[IndexRange]:
    """Return chunk `index` of `count` of the indices in `ranges`, split like torch.chunk."""
    total = sum(length for _, length in ranges)
    size = math.ceil(total / count)
    begin, end = min(index * size, total), min((index + 1) * size, total)
    out = []
    position = 0
    for first, length in ranges:
        a, b = max(begin, position), min(end, position + length)
        if a < b:
            out.append((first + a - position, b - a))
        position += length
    return out


def shard_boxes(
    shape: tuple[int, ...],
    mesh_sizes: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    *,
    right_to_left: bool = True,
) -> tuple[ShardBox, ...]:
    """Return the boxes that the rank at `coordinate` holds of a tensor of `shape`.

    A strided shard has two interpretations, which agree unless the chunks are very uneven. With
    `right_to_left`, the axes to the right split first and the strided axis after them, as in
    FSDP2. Otherwise axes split from left to right, as in DTensor's redistribution. A split
    factor that the axes to the right do not explain is always read from left to right.
    """
    axes = list(zip(placements, mesh_sizes, coordinate, strict=True))
    right_to_left = right_to_left and _explained(axes)
    ranges: list[list[IndexRange]] = []
    for dim, size in enumerate(shape):
        splits = [axis for axis in axes if not isinstance(axis[0], Replicate) and axis[0].dim == dim]
        ranges.append(_split_dim(size, splits, right_to_left=right_to_left))
    return tuple(_boxes(ranges))


def _explained(axes: list[tuple[Placement, int, int]]) -> bool:
    """Return True if every split factor is the number of chunks made by the axes to its right."""
    for position, (placement, _, _) in enumerate(axes):
        if isinstance(placement, StridedShard):
            right = [
                count
                for other, count, _ in axes[position + 1 :]
                if not isinstance(other, Replicate) and other.dim == placement.dim
            ]
            if math.prod(right) != placement.split_factor:
                return False
    return True


def _split_dim(size: int, splits: list[tuple[Placement, int, int]], *, right_to_left: bool) -> list[IndexRange]:
    ranges: list[IndexRange] = [(0, size)] if size else []
    if right_to_left:
        plain = [axis for axis in splits if isinstance(axis[0], Shard)]
        strided = [axis for axis in splits if isinstance(axis[0], StridedShard)]
        for _, count, index in [*plain, *reversed(strided)]:
            ranges = chunk(ranges, count, index)
        return ranges
    for placement, count, index in splits:
        if isinstance(placement, StridedShard):
            chunks = [chunk(ranges, placement.split_factor, number) for number in range(placement.split_factor)]
            ranges = [part for inner in chunks for part in chunk(inner, count, index)]
        else:
            ranges = chunk(ranges, count, index)
    return ranges


def _boxes(ranges: list[list[IndexRange]]) -> list[ShardBox]:
    placed = []
    for dim_ranges in ranges:
        local = itertools.accumulate((length for _, length in dim_ranges), initial=0)
        placed.append([(first, at, length) for (first, length), at in zip(dim_ranges, local, strict=False)])
    out = []
    for combination in itertools.product(*placed):
        sizes = tuple(length for _, _, length in combination)
        box = Box(tuple(first for first, _, _ in combination), sizes)
        out.append(ShardBox(box, Box(tuple(at for _, at, _ in combination), sizes)))
    return out


def local_shape(parts: Sequence[ShardBox], rank_dims: int) -> tuple[int, ...] | None:
    """Return the shape of the array that holds `parts`, or None if it is empty."""
    if not parts:
        return None
    return tuple(max(part.local.stops[dim] for part in parts) for dim in range(rank_dims))


@dataclass(frozen=True, slots=True)
class Whole:
    """Every rank holds the whole tensor."""

    @property
    def tp_degree(self) -> int | None:
        """The tensor-parallel degree; None if it is not known."""
        return 1

    def boxes(self, shape: tuple[int, ...], ranks: Sequence[int]) -> Iterator[tuple[int, Box]]:
        for rank in ranks:
            yield rank, Box.full(shape)


@dataclass(frozen=True, slots=True)
class Boxes:
    """A rank holds exactly these boxes."""

    held: tuple[Box, ...]

    @property
    def tp_degree(self) -> int | None:
        """The tensor-parallel degree; None if it is not known."""
        return None

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

    @property
    def tp_degree(self) -> int | None:
        """The tensor-parallel degree; None if the mesh has no meaningful axis names."""
        return self.mesh.tp_degree

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
