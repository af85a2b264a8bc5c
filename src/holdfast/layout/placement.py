"""Placements: how a mesh axis shards a tensor, and the resulting boxes of each rank.

The semantics are those of DTensor: a dim is split like `torch.chunk`, so the last ranks of an
axis may hold less, or nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.layout.box import Box

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
