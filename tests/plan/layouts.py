"""Small files whose tensors are spread over ranks and hosts at random, and the bytes that they must have."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan.coverage import Holding, cells_of
from holdfast.plan.files import FilePlan, Place, RawArray, TensorSpec, bytes_of, raw_dtype, split_group


def holding(shape: tuple[int, ...], held: Sequence[tuple[int, Box]]) -> Holding:
    boxes = [box for _, box in held]
    return Holding(tuple(cells_of(shape, boxes, "w")), tuple(rank for rank, _ in held), tuple(boxes))


@dataclass(frozen=True)
class Layout:
    """Planned files, the holders of each tensor by key, and the host of each rank."""

    files: tuple[FilePlan, ...]
    holdings: Mapping[str, Holding]
    hosts: list[int]

    def holding_of(self, place: Place) -> Holding:
        return self.holdings[place.spec.key]

    def holds(self, rank: int, place: Place) -> bool:
        ranks = self.holding_of(place).ranks
        return any(ranks[holder] == rank for cell in self.holding_of(place).cells for holder in cell.holders)

    def array(self, place: Place) -> RawArray:
        """The whole tensor, with elements that no other tensor has at the same position."""
        seed = zlib.crc32(place.spec.key.encode())
        data = np.random.default_rng(seed).integers(0, 256, place.spec.bytes, dtype=np.uint8)
        return data.view(raw_dtype(place)).reshape(place.spec.shape)

    def shard(self, place: Place, held: Box) -> RawArray:
        return np.ascontiguousarray(self.array(place)[held.within(Box.full(place.spec.shape))])

    def content(self, file: FilePlan) -> bytes:
        return file.header + b"".join(bytes(bytes_of(self.array(place))) for place in file.places)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world = draw(st.integers(1, 5))
    hosts = [draw(st.integers(0, 2)) for _ in range(world)]
    specs, holdings = [], {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        spec = TensorSpec(f"t{number}", dtype_named(draw(st.sampled_from(["uint8", "float16", "float64"]))), shape)
        specs.append(spec)
        holdings[spec.key] = holding(shape, draw(spreads(shape, world)))
    return Layout(split_group("model", specs, draw(st.sampled_from([100, 10_000]))), holdings, hosts)


@st.composite
def spreads(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> list[tuple[int, Box]]:
    """Parts along a dim, each on one rank or several, and sometimes a rank that has everything."""
    ranks = st.integers(0, world - 1)
    held = [(draw(ranks), Box.full(shape))] if draw(st.integers(0, 4)) == 0 or not shape else []
    if shape:
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = draw(st.sets(st.integers(1, max(1, shape[dim] - 1)), max_size=3)) if shape[dim] > 1 else set()
        borders = [0, *sorted(cuts), shape[dim]]
        for begin, end in itertools.pairwise(borders):
            offsets = tuple(begin if d == dim else 0 for d in range(len(shape)))
            sizes = tuple(end - begin if d == dim else size for d, size in enumerate(shape))
            held += [(rank, Box(offsets, sizes)) for rank in sorted(draw(st.sets(ranks, min_size=1, max_size=2)))]
    return draw(st.permutations(held))
