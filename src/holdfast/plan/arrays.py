"""Arrays per shard: the sources of a save and the destinations of a load.

Every array is raw: unsigned integers as wide as the element, with the shape of the shard's box.
An array may be a strided view of a live tensor.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.layout.box import Box
from holdfast.plan.files import Place
from holdfast.plan.pieces import ShardPiece, TensorRun

RawArray = npt.NDArray[Any]


def raw_dtype(place: Place) -> np.dtype[Any]:
    return np.dtype(f"u{place.spec.dtype.bytes}")


class Sources(Protocol):
    """The shards of this rank, to be saved."""

    def array(self, place: Place, held: Box) -> RawArray:
        """Return the shard with the box `held`. The array stays valid until the next call."""


class ShardDestination(Protocol):
    """A shard that a load fills."""

    def direct(self) -> RawArray | None:
        """Return the live memory if raw bytes may be written to it directly, else None."""

    def put(self, part: Box, data: RawArray) -> None:
        """Store `data` in the box `part`, relative to the shard, casting or copying to a device as needed."""


class ArrayDestination:
    """A destination in host memory, backed by a raw array."""

    def __init__(self, array: RawArray) -> None:
        self._array = array

    def direct(self) -> RawArray | None:
        return self._array

    def put(self, part: Box, data: RawArray) -> None:
        part_of(self._array, part, Box.full(self._array.shape))[...] = data


def part_of(array: RawArray, part: Box, held: Box) -> RawArray:
    """Return a view of the box `part` of an array that holds the box `held`."""
    return array[part.within(held)]


def bytes_of(array: RawArray) -> memoryview:
    """Return the bytes of a contiguous array without copying."""
    return array.reshape(-1).view("u1").data


def run_array(buffer: RawArray, run: TensorRun) -> RawArray:
    """Return the view of a run in the buffer of a block or portion, with the shape of the run's box."""
    span = buffer[run.at : run.at + run.bytes]
    return span.view(raw_dtype(run.place)).reshape(run.box.sizes)


def piece_in_run(buffer: RawArray, piece: ShardPiece) -> RawArray:
    """Return the view of a piece in the buffer of a block or portion."""
    return part_of(run_array(buffer, piece.run), piece.part, piece.run.box)


def aligned_buffer(size: int) -> RawArray:
    """Allocate a page-aligned buffer, so that views of any element width are aligned."""
    buffer = np.empty(size + 4096, dtype=np.uint8)
    skip = -buffer.ctypes.data % 4096
    return buffer[skip : skip + size]
