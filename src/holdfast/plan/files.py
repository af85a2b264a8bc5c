"""The canonical split of a group into files, runs and pieces of blocks, raw arrays and destinations of bytes.

Names, order, headers and offsets depend only on keys, dtypes and global shapes. Equal states
therefore produce equal bytes on any mesh.

A block is a range of a file's bytes. Its overlap with a tensor is a few runs: boxes that are
contiguous in the file. A piece is the part of a run that one rank holds. Saves gather pieces into
blocks and loads scatter blocks into pieces, with the same value.

Every array is raw: unsigned integers as wide as the element, with the shape of the shard's box.
An array may be a strided view of a live tensor.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.core import limits
from holdfast.core.errors import Unsupported
from holdfast.core.names import ADAPTER, file_stem, natural_key, tensor_file
from holdfast.format.dtypes import DType
from holdfast.format.safetensors import TensorEntry, encode_header
from holdfast.layout.box import Box, flat_boxes

_HEADER_FRAME = 1000  # exceeds the size of a header without tensors


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A whole stored tensor: its key, dtype and global shape."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    bytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", math.prod(self.shape) * self.dtype.bits // 8)


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a stored tensor: its spec, its file and the byte offset of its first element."""

    spec: TensorSpec
    file: str
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.spec.bytes


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A tensor file: its name, number, header, size, and its tensors in byte order."""

    name: str
    number: int
    header: bytes
    size: int
    places: tuple[Place, ...]


def split_group(group: str, specs: Iterable[TensorSpec], max_shard_bytes: int, kind: str = "") -> tuple[FilePlan, ...]:
    """Split the tensors of a group into planned files."""
    return tuple(file.plan() for file in assign_to_files(group, specs, max_shard_bytes, kind))


@dataclass(frozen=True, slots=True)
class FileMembers:
    """The tensors assigned to a file. Assigning is cheap; `plan` encodes the header."""

    name: str
    number: int
    members: Sequence[TensorSpec]

    @property
    def header_limit(self) -> int:
        """An upper bound on the header's size in bytes."""
        return _HEADER_FRAME + sum(map(_entry_bytes, self.members))

    def plan(self) -> FilePlan:
        # Wide elements first: every tensor then starts at a multiple of its element size.
        ordered = sorted(self.members, key=lambda spec: -spec.dtype.bits)
        entries = []
        position = 0
        for spec in ordered:
            entries.append(TensorEntry(spec.key, spec.dtype, spec.shape, position, position + spec.bytes))
            position += spec.bytes
        header = encode_header(entries)
        places = tuple(
            Place(spec, self.name, len(header) + entry.begin) for spec, entry in zip(ordered, entries, strict=True)
        )
        return FilePlan(self.name, self.number, header, len(header) + position, places)


def assign_to_files(group: str, specs: Iterable[TensorSpec], max_shard_bytes: int, kind: str = "") -> list[FileMembers]:
    """Assign tensors to files greedily in natural order; a group without tensors gets one empty file.

    An adapter is one file of any size, because PEFT opens no other.
    """
    ordered = sorted(specs, key=lambda spec: natural_key(spec.key))
    stem = file_stem(group, kind)
    if kind == ADAPTER:
        if len(ordered) > limits.HEADER_TENSORS or sum(map(_entry_bytes, ordered)) > limits.HEADER_BYTES:
            raise Unsupported(f"{group}: {len(ordered)} tensors of an adapter, more than one file can hold")
        return [FileMembers(f"{stem}.safetensors", 0, ordered)]
    files: list[list[TensorSpec]] = [[]]
    size = header = 0
    for spec in ordered:
        entry_bytes = _entry_bytes(spec)
        full = size + spec.bytes > max_shard_bytes or header + entry_bytes > limits.HEADER_BYTES // 2
        if files[-1] and (full or len(files[-1]) >= limits.HEADER_TENSORS // 2):
            files.append([])
            size = header = 0
        files[-1].append(spec)
        size += spec.bytes
        header += entry_bytes
    return [
        FileMembers(tensor_file(stem, number + 1, len(files)), number, members) for number, members in enumerate(files)
    ]


def _entry_bytes(spec: TensorSpec) -> int:
    """Return an upper bound on a tensor's bytes in a header, so that no reader's limit is exceeded."""
    return 2 * len(spec.key.encode()) + 20 * len(spec.shape) + 120


@dataclass(frozen=True, slots=True)
class TensorRun:
    """A box of a tensor that is contiguous in a block and starts at byte `at` of the block."""

    place: Place
    box: Box
    at: int

    @property
    def bytes(self) -> int:
        return self.box.volume * self.place.spec.dtype.bytes


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """The part of a run that `rank` holds in its shard with the box `held`."""

    run: TensorRun
    part: Box
    rank: int
    held: Box

    @property
    def at(self) -> int:
        """The byte of the block at which the piece begins; its rows are as far apart as those of its run."""
        inside = self.part.relative_to(self.run.box).flat_offset(self.run.box.sizes)
        return self.run.at + inside * self.run.place.spec.dtype.bytes

    @property
    def bytes(self) -> int:
        return self.part.volume * self.run.place.spec.dtype.bytes


def runs_in(places: Sequence[Place], begins: Sequence[int], offset: int, size: int) -> Iterator[TensorRun]:
    """Yield the runs of the block [offset, offset + size), given a file's tensors in byte order."""
    end = offset + size
    for index in range(max(0, bisect.bisect_right(begins, offset) - 1), len(places)):
        place = places[index]
        if place.begin >= end:
            return
        begin, stop = max(offset, place.begin), min(end, place.end)
        if begin >= stop:
            continue
        item = place.spec.dtype.bytes
        at = begin - offset
        for box in flat_boxes(place.spec.shape, (begin - place.begin) // item, (stop - place.begin) // item):
            yield TensorRun(place, box, at)
            at += box.volume * item


def row_major_strides(sizes: Sequence[int], item: int) -> tuple[int, ...]:
    """Return the strides in bytes of an array in row-major order."""
    strides = [item] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)


RawArray = npt.NDArray[Any]


def raw_dtype(place: Place) -> np.dtype[Any]:
    return np.dtype(f"u{place.spec.dtype.bytes}")


class Sources(Protocol):
    """The shards of this rank, to be saved. Thread-safe."""

    def array(self, piece: ShardPiece) -> RawArray:
        """Return a piece that this rank holds: live memory where possible, else a copy."""


class FlatDestination(Protocol):
    """A shard that is contiguous in memory, filled as bytes in row-major order; offsets count stored bytes."""

    @property
    def memory(self) -> RawArray | None:
        """Its bytes in host memory; None on a device."""

    def write(self, at: int, pitch: int, rows: RawArray) -> None:
        """Store rows of bytes, `pitch` bytes apart from `at` on. On a device, `rows` may be used after the return."""


class ShardDestination(Protocol):
    """A shard that a load fills."""

    def flat(self) -> FlatDestination | None:
        """Return the shard as bytes if it is contiguous and takes the stored bytes as they are, else None."""

    def direct(self) -> RawArray | None:
        """Return the live memory if raw bytes may be written to it directly, else None."""

    def put(self, part: Box, data: RawArray) -> None:
        """Store `data` in the box `part`, relative to the shard, casting or copying to a device as needed."""


class FlatArray:
    """Contiguous host memory as a flat destination."""

    def __init__(self, array: RawArray) -> None:
        self.memory = array.reshape(-1).view(np.uint8)

    def write(self, at: int, pitch: int, rows: RawArray) -> None:
        byte_rows(self.memory, at, pitch, *rows.shape)[...] = rows

    @staticmethod
    def of(array: RawArray | None) -> FlatArray | None:
        """Return an array as a flat destination; None without one, or if it is not contiguous."""
        return None if array is None or not array.flags.c_contiguous else FlatArray(array)


def byte_rows(memory: RawArray, at: int, pitch: int, count: int, width: int) -> RawArray:
    """Return a view of rows of `width` bytes, `pitch` bytes apart, in contiguous bytes."""
    return np.ndarray((count, width), np.uint8, memory.data, at, (pitch, 1))


class ArrayDestination:
    """A destination in host memory, backed by a raw array."""

    def __init__(self, array: RawArray) -> None:
        self._array = array

    def flat(self) -> FlatDestination | None:
        return FlatArray.of(self._array)

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
