"""Arrays by shard: where bytes come from in a save and go to in a load.

All arrays are raw: unsigned integers as wide as the element, shaped like the shard's box.
They may be strided views of live tensors.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.layout.box import Box
from holdfast.plan.files import Place
from holdfast.plan.pieces import Piece, Run

RawArray = npt.NDArray[Any]


def raw_dtype(place: Place) -> np.dtype[Any]:
    return np.dtype(f"u{place.spec.dtype.bytes}")


class Sources(Protocol):
    """This rank's shards, for a save."""

    def array(self, place: Place, held: Box) -> RawArray:
        """The shard that `held` names; it stays valid until the next call."""


class Destination(Protocol):
    """One shard to be filled by a load."""

    def direct(self) -> RawArray | None:
        """The live memory itself, when raw bytes may be put straight into it."""

    def put(self, part: Box, data: RawArray) -> None:
        """Take `part` (counted from the shard's begin), converting or copying to a device."""


class ArrayDestination:
    """A raw array in host memory as a destination."""

    def __init__(self, array: RawArray) -> None:
        self._array = array

    def direct(self) -> RawArray | None:
        return self._array

    def put(self, part: Box, data: RawArray) -> None:
        part_of(self._array, part, Box.full(self._array.shape))[...] = data


def part_of(array: RawArray, part: Box, held: Box) -> RawArray:
    """A view of `part` in the array that holds `held`."""
    return array[part.within(held)]


def bytes_of(array: RawArray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view("u1").data


def run_array(buffer: RawArray, run: Run) -> RawArray:
    """The bytes of a run inside a block's or portion's buffer, shaped like the run's box."""
    span = buffer[run.at : run.at + run.bytes]
    return span.view(raw_dtype(run.place)).reshape(run.box.sizes)


def piece_in_run(buffer: RawArray, piece: Piece) -> RawArray:
    """A piece inside a block's or portion's buffer."""
    return part_of(run_array(buffer, piece.run), piece.part, piece.run.box)


def aligned_buffer(size: int) -> RawArray:
    """Bytes that begin at a page, so that views of any element width are aligned."""
    buffer = np.empty(size + 4096, dtype=np.uint8)
    skip = -buffer.ctypes.data % 4096
    return buffer[skip : skip + size]
