"""Describe which elements of a tensor, in row-major order, the ranks of a mesh have, to compare them after a reshape.

A dim is a row of digits, each with its size and its stride in elements. A shard of it fixes the leading digits, a
strided shard those behind its factor; the free digits, in order, count the rank's own elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from holdfast.spmd.sharding.shard_sizes import sharded_dim

Digits = list[tuple[int, int]]  # size and stride, the leading digit first
Pick = tuple[tuple[int, int], ...] | tuple[str, int, int]  # digits, or uneven shards of one digit


def local_elements(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Pick] | None:
    """Return what each mesh axis picks; None if it is not a row of digits. Partials and replicas pick nothing."""
    dims = [[(size, math.prod(shape[dim + 1 :]))] for dim, size in enumerate(shape)]
    picks: list[Pick] = []
    for axis, place in enumerate(placements):
        if (dim := sharded_dim(place)) is None:
            picks.append(())
            continue
        found = _pick(dims[dim], getattr(place, "split_factor", 1), mesh.size(axis))
        if found is None:
            return None
        pick, dims[dim] = found
        picks.append(pick)
    return picks


def _pick(digits: Digits, factor: int, ranks: int) -> tuple[Pick, Digits] | None:
    """Return what an axis picks of a dim's free digits, and the digits that stay free."""
    if (split := _split(digits, factor)) is None:
        return None
    head, tail = split
    if (split := _split(tail, ranks)) is not None:
        picked, rest = split
        return tuple(picked), _joined(head + rest)
    if len(tail) != 1:
        return None
    size, stride = tail[0]
    return ("uneven", size, stride), []  # no digits describe what is left: another axis picks nothing


def _split(digits: Digits, count: int) -> tuple[Digits, Digits] | None:
    """Split off the leading digits that count to `count`; None where that would break a digit unevenly."""
    head: Digits = []
    for index, (size, stride) in enumerate(digits):
        if count == 1:
            return _joined(head), digits[index:]
        if size % count == 0:
            head.append((count, stride * (size // count)))
            rest = [(size // count, stride)] if size > count else []
            return _joined(head), rest + digits[index + 1 :]
        if count % size:
            return None
        head.append((size, stride))
        count //= size
    return (_joined(head), []) if count == 1 else None


def _joined(digits: Digits) -> Digits:
    """Join neighbours that count as one digit."""
    joined: Digits = []
    for size, stride in digits:
        before = joined.pop()[0] if joined and joined[-1][1] == size * stride else 1
        joined.append((before * size, stride))
    return joined
