"""Fused weights (qkv, gate and up): order and sizes of their segments by heads and TP degree; fuse and unfuse.

A fused weight is a list of segments, each a range of one part. Fusing, splitting and reordering read
the same list in one direction or the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.mapping.syntax.statement import Options
from holdfast.plan.recipe import Recipe

S = TypeVar("S")

GATE, UP = 0, 1
Q, K, V = 0, 1, 2


class FusionError(Exception):
    """Sizes, heads and degrees do not fit together; the message says which."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`size` elements of a part, starting at `begin`."""

    part: int
    begin: int
    size: int


def segments_of(options: Options, sizes: Sequence[int], degree: int, *, equal_heads: bool = True) -> list[Segment]:
    """Return the segments of a fused weight with parts of these sizes, fused for the TP degree `degree`.

    `equal_heads` rejects heads of different sizes unless `sizes=` allows them.
    """
    if options.fused == "fused_ffn":
        return _ffn(sizes, degree)
    heads, groups = _heads(options)
    head_sizes = _head_sizes(sizes, heads, groups, equal_heads=equal_heads and options.sizes is None)
    if options.fused == "fused_qkv":
        return _qkv(heads, groups, head_sizes)
    return _qkv_old(heads, groups, head_sizes, degree)


def segment_count(options: Options, degree: int) -> int:
    """Return the maximum number of segments."""
    return 3 * (options.num_key_value_groups or 0 if options.fused == "fused_qkv" else degree)


def part_sizes(options: Options, fused_size: int, degree: int) -> tuple[int, ...]:
    """Return the sizes of the parts of a fused weight of this size."""
    if options.fused == "fused_ffn":
        if fused_size % 2:
            raise FusionError(f"a fused dim of {fused_size} does not split into two equal parts")
        return fused_size // 2, fused_size // 2
    heads, groups = _heads(options)
    stored = max(groups, degree) if options.fused == "fused_qkv_old" else groups
    if fused_size % (heads + 2 * stored):
        raise FusionError(f"a fused dim of {fused_size} does not split evenly into {heads} + 2 * {stored} heads")
    head_size = fused_size // (heads + 2 * stored)
    return heads * head_size, groups * head_size, groups * head_size


def check_part_sizes(options: Options, sizes: Sequence[int], fused_size: int, degree: int) -> None:
    """Raise FusionError if parts of these sizes do not add up to the fused weight."""
    _, groups = _heads(options)
    copies = max(degree // groups, 1) if options.fused == "fused_qkv_old" else 1
    found = sizes[Q] + copies * (sizes[K] + sizes[V])
    if found != fused_size:
        raise FusionError(f"q, k and v of {sizes[Q]}, {sizes[K]} and {sizes[V]} add up to {found}, not {fused_size}")


def fuse(parts: Sequence[Recipe[S]], segments: Sequence[Segment], dim: int) -> Recipe[S]:
    """Fuse the parts into one weight."""
    pieces: list[dict[int, Recipe[S]]] = []
    for number, part in enumerate(parts):
        begins = sorted({segment.begin for segment in segments if segment.part == number})
        size = part.shape[dim] // len(begins)  # all segments of a part have the same size
        pieces.append(dict(zip(begins, part.split(dim, [size] * len(begins)), strict=True)))
    return Recipe.concat([pieces[segment.part][segment.begin] for segment in segments], dim)


def unfuse(fused: Recipe[S], segments: Sequence[Segment], dim: int) -> list[Recipe[S]]:
    """Split a fused weight into its parts; of repeated segments, the first is taken."""
    pieces = fused.split(dim, [segment.size for segment in segments])
    found: dict[int, dict[int, Recipe[S]]] = {}
    for segment, piece in zip(segments, pieces, strict=True):
        found.setdefault(segment.part, {}).setdefault(segment.begin, piece)
    return [Recipe.concat([of[begin] for begin in sorted(of)], dim) for _, of in sorted(found.items())]


def _ffn(sizes: Sequence[int], degree: int) -> list[Segment]:
    if sizes[GATE] != sizes[UP]:
        raise FusionError(
            f"gate and up have {sizes[GATE]} and {sizes[UP]} elements along the fused dim; they must be equal"
        )
    if sizes[GATE] % degree:
        raise FusionError(f"a TP degree of {degree} does not divide the {sizes[GATE]} elements of gate and up")
    each = sizes[GATE] // degree
    return [Segment(part, rank * each, each) for rank in range(degree) for part in (GATE, UP)]


def _heads(options: Options) -> tuple[int, int]:
    assert options.num_heads is not None and options.num_key_value_groups is not None  # checked by the grammar
    return options.num_heads, options.num_key_value_groups


def _head_sizes(sizes: Sequence[int], heads: int, groups: int, *, equal_heads: bool) -> tuple[int, int, int]:
    """Return the sizes of one head of q, k and v. `equal_heads` rejects different sizes."""
    for name, size, count in zip("qkv", sizes, (heads, groups, groups), strict=True):
        if size % count:
            raise FusionError(f"the {size} elements of {name} do not split evenly into its {count} heads")
    found = sizes[Q] // heads, sizes[K] // groups, sizes[V] // groups
    if equal_heads and len(set(found)) > 1:
        raise FusionError(
            f"heads of different sizes: q has {sizes[Q]} elements for {heads} heads ({found[Q]} each), k {sizes[K]} "
            f"and v {sizes[V]} for {groups} ({found[K]} and {found[V]} each); num_key_value_groups counts the "
            "key and value heads; if heads differ (q with a gate has twice the size), add sizes=any"
        )
    return found


def _qkv(heads: int, groups: int, sizes: tuple[int, int, int]) -> list[Segment]:
    each = heads // groups * sizes[Q]
    out = []
    for group in range(groups):
        out.append(Segment(Q, group * each, each))
        out.append(Segment(K, group * sizes[K], sizes[K]))
        out.append(Segment(V, group * sizes[V], sizes[V]))
    return out


def _qkv_old(heads: int, groups: int, sizes: tuple[int, int, int], degree: int) -> list[Segment]:
    if heads % degree:
        raise FusionError(f"a TP degree of {degree} does not divide {heads} heads")
    if degree <= groups and groups % degree:
        raise FusionError(f"a TP degree of {degree} does not divide {groups} key and value heads")
    if degree > groups and degree % groups:
        raise FusionError(
            f"a TP degree of {degree} is not a multiple of {groups} key and value heads, which it repeats"
        )
    queries = heads // degree * sizes[Q]
    count = max(groups // degree, 1)
    out = []
    for rank in range(degree):
        first = rank * groups // degree
        out.append(Segment(Q, rank * queries, queries))
        out.extend(Segment(part, first * sizes[part], count * sizes[part]) for part in (K, V))
    return out
