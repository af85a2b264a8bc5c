"""Random layouts: shapes, meshes, placements and flat ranges, with what numpy says each rank holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from holdfast.layout.box import Box
from holdfast.layout.flat import flat_boxes
from holdfast.layout.placement import Part, Placement, Replicate, Shard, StridedShard, parts_of


@dataclass(frozen=True)
class Sharding:
    """A mesh and placements; or, with `flat` set, borders of flat ranges of that many ranks."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    flat: tuple[int, ...] | None = None

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(size) for size in self.sizes)))

    def parts(self, rank: int) -> tuple[Part, ...]:
        if self.flat is None:
            return parts_of(self.shape, self.sizes, self.placements, self.coordinates[rank])
        out, at = [], 0
        for box in flat_boxes(self.shape, self.flat[rank], self.flat[rank + 1]):
            out.append(Part(box, Box((at,), (box.volume,))))
            at += box.volume
        return tuple(out)

    def local(self, rank: int, full: np.ndarray) -> np.ndarray:
        """What numpy says the rank holds."""
        if self.flat is not None:
            return full.reshape(-1)[self.flat[rank] : self.flat[rank + 1]]
        plain = [axis for axis, p in enumerate(self.placements) if isinstance(p, Shard)]
        strided = [axis for axis, p in enumerate(self.placements) if isinstance(p, StridedShard)]
        for axis in [*plain, *reversed(strided)]:
            dim = self.placements[axis].dim
            full = torch_chunk(full, self.sizes[axis], dim)[self.coordinates[rank][axis]]
        return full


def torch_chunk(array: np.ndarray, count: int, dim: int) -> list[np.ndarray]:
    """As torch.chunk cuts, with empty parts at the end."""
    step = math.ceil(array.shape[dim] / count)
    borders = [min(index * step, array.shape[dim]) for index in range(count + 1)]
    index = [slice(None)] * array.ndim
    out = []
    for begin, end in itertools.pairwise(borders):
        index[dim] = slice(begin, end)
        out.append(array[tuple(index)])
    return out


def shapes(largest: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, largest), min_size=0, max_size=4).map(tuple)


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> Sharding:
    if draw(st.integers(0, 3)) == 0:
        ranks = draw(st.integers(1, 5))
        total = math.prod(shape)
        inner = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
        return Sharding(shape, (ranks,), (), (0, *inner, total))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    placements: list[Placement] = []
    for axis, size in reversed(list(enumerate(sizes))):
        if not shape or draw(st.integers(0, 2)) == 0:
            placements.insert(0, Replicate())
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        right = [
            sizes[axis + 1 + offset]
            for offset, p in enumerate(placements)
            if not isinstance(p, Replicate) and p.dim == dim
        ]
        strided = bool(right) and draw(st.booleans())
        placements.insert(0, StridedShard(dim, math.prod(right)) if strided else Shard(dim))
        assert size
    return Sharding(shape, sizes, tuple(placements))
