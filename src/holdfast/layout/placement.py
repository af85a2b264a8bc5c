"""Placements: how a mesh axis divides a tensor, and which boxes that gives each rank.

The semantics are those of DTensor: a dim is cut as `torch.chunk` cuts it, so the last
ranks of an axis may hold less, or nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.layout.box import Box

Span = tuple[int, int]  # of indices along one dim: first, count


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts `dim` into as many parts as it has ranks."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The axis cuts each of `split_factor` parts that axes to its right have made of `dim`.

    FSDP2 over tensor parallelism holds its parameters so: tensor parallelism cuts first.
    """

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the whole tensor and where it lies in the rank's own array."""

    box: Box
    local: Box


def cut(spans: Sequence[Span], count: int, index: int) -> list[Span]:
    """Part `index` of `count` of the indices in `spans`, cut as torch.chunk cuts."""
    total = sum(length for _, length in spans)
    size = math.ceil(total / count)
    begin, end = min(index * size, total), min((index + 1) * size, total)
    out = []
    position = 0
    for first, length in spans:
        a, b = max(begin, position), min(end, position + length)
        if a < b:
            out.append((first + a - position, b - a))
        position += length
    return out


def parts_of(
    shape: tuple[int, ...],
    mesh_sizes: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    *,
    right_to_left: bool = True,
) -> tuple[Part, ...]:
    """What the rank at `coordinate` holds of a tensor of `shape`.

    A strided shard can be read in two ways that agree unless the cuts are very uneven:
    the right axes cut first and the strided one after them, as FSDP2 does
    (`right_to_left`), or from left to right as DTensor's redistribution does. A split
    factor that the axes to the right do not explain is always read from left to right.
    """
    axes = list(zip(placements, mesh_sizes, coordinate, strict=True))
    right_to_left = right_to_left and _explained(axes)
    spans: list[list[Span]] = []
    for dim, size in enumerate(shape):
        cuts = [axis for axis in axes if not isinstance(axis[0], Replicate) and axis[0].dim == dim]
        spans.append(_cut_dim(size, cuts, right_to_left=right_to_left))
    return tuple(_parts(spans))


def _explained(axes: list[tuple[Placement, int, int]]) -> bool:
    """Whether every split factor is the number of parts that the axes to its right make."""
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


def _cut_dim(size: int, cuts: list[tuple[Placement, int, int]], *, right_to_left: bool) -> list[Span]:
    spans: list[Span] = [(0, size)] if size else []
    if right_to_left:
        plain = [axis for axis in cuts if isinstance(axis[0], Shard)]
        strided = [axis for axis in cuts if isinstance(axis[0], StridedShard)]
        for _, count, index in [*plain, *reversed(strided)]:
            spans = cut(spans, count, index)
        return spans
    for placement, count, index in cuts:
        if isinstance(placement, StridedShard):
            pieces = [cut(spans, placement.split_factor, piece) for piece in range(placement.split_factor)]
            spans = [span for piece in pieces for span in cut(piece, count, index)]
        else:
            spans = cut(spans, count, index)
    return spans


def _parts(spans: list[list[Span]]) -> list[Part]:
    placed = []
    for dim_spans in spans:
        local = itertools.accumulate((length for _, length in dim_spans), initial=0)
        placed.append([(first, at, length) for (first, length), at in zip(dim_spans, local, strict=False)])
    out = []
    for combination in itertools.product(*placed):
        sizes = tuple(length for _, _, length in combination)
        box = Box(tuple(first for first, _, _ in combination), sizes)
        out.append(Part(box, Box(tuple(at for _, at, _ in combination), sizes)))
    return out


def local_shape(parts: Sequence[Part], rank_dims: int) -> tuple[int, ...] | None:
    """The shape of the array that holds `parts`, or None if there are none."""
    if not parts:
        return None
    return tuple(max(part.local.stops[dim] for part in parts) for dim in range(rank_dims))
