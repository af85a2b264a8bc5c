"""Hypothesis strategies: shapes, meshes and shardings with numpy's shards, arrays of every dtype, keys, states."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from holdfast.core.names import key_problem
from holdfast.format.dtypes import numpy_dtype
from holdfast.layout.box import Box, flat_boxes
from holdfast.layout.placement import Placement, Replicate, Shard, ShardBox, StridedShard, shard_boxes

Array = npt.NDArray[Any]
DTYPES = ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int8", "int64", "uint16", "bool")


@dataclass(frozen=True)
class Sharding:
    """A mesh and placements; or, with `flat`, the borders of the flat ranges of that many ranks."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    flat: tuple[int, ...] | None = None

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(size) for size in self.sizes)))

    def parts(self, rank: int) -> tuple[ShardBox, ...]:
        if self.flat is None:
            return shard_boxes(self.shape, self.sizes, self.placements, self.coordinates[rank])
        out, at = [], 0
        for box in flat_boxes(self.shape, self.flat[rank], self.flat[rank + 1]):
            out.append(ShardBox(box, Box((at,), (box.volume,))))
            at += box.volume
        return tuple(out)

    def local(self, rank: int, full: Array) -> Array:
        """Return the shard of a rank as numpy computes it."""
        if self.flat is not None:
            return full.reshape(-1)[self.flat[rank] : self.flat[rank + 1]]
        plain = [axis for axis, p in enumerate(self.placements) if isinstance(p, Shard)]
        strided = [axis for axis, p in enumerate(self.placements) if isinstance(p, StridedShard)]
        for axis in [*plain, *reversed(strided)]:
            placement = self.placements[axis]
            assert not isinstance(placement, Replicate)
            dim = placement.dim
            full = torch_chunk(full, self.sizes[axis], dim)[self.coordinates[rank][axis]]
        return full


def torch_chunk(array: Array, count: int, dim: int) -> list[Array]:
    """Split like torch.chunk, with empty chunks at the end."""
    step = math.ceil(array.shape[dim] / count)
    borders = [min(index * step, array.shape[dim]) for index in range(count + 1)]
    index = [slice(None)] * array.ndim
    out = []
    for begin, end in itertools.pairwise(borders):
        index[dim] = slice(begin, end)
        out.append(array[tuple(index)])
    return out


def keys() -> st.SearchStrategy[str]:
    """Keys of tensors, usual and unusual ones."""
    characters = st.characters(min_codepoint=32, max_codepoint=0x2FF)
    return st.text(characters, min_size=1, max_size=20).filter(lambda key: not key_problem(key))


@st.composite
def arrays(draw: st.DrawFn, largest: int = 9) -> Array:
    """An array of any shape and dtype with random bits, including NaN and negative zero."""
    dtype = numpy_dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(shapes(largest))
    count = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).bytes(count)
    if dtype == np.dtype(bool):
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def values() -> st.SearchStrategy[Any]:
    """Non-tensor values of a state: JSON values."""
    plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=20)
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner))


def states() -> st.SearchStrategy[dict[str, Any]]:
    """A state for one process: tensors as numpy arrays under "tensors", and a value under "value"."""
    tensors = st.dictionaries(keys(), arrays(), min_size=1, max_size=5)
    return st.fixed_dictionaries({"tensors": tensors, "value": values()})


def shapes(largest: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of up to four dims, including 0-d and empty ones."""
    return st.lists(st.integers(0, largest), min_size=0, max_size=4).map(tuple)


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> Sharding:
    """A sharding of a shape: flat ranges, or a mesh of up to three axes with placements, also strided ones."""
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
