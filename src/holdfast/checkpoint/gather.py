"""Gathering: the bytes of a block or of a travel file in order, from fragments of memory and of other ranks.

Blocking saves take fragments from live tensors, writer processes from arenas. Both take what
another host holds from its travel file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from holdfast.checkpoint.attempt import PlannedBlock
from holdfast.core.errors import HoldfastError
from holdfast.plan.files import RawArray, aligned_buffer, bytes_of
from holdfast.storage.base import Storage, Writer

_TRAVEL_BYTES = 32 << 20  # of a travel file, written at a time


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements of `item` bytes for byte `at` of a block or travel file, where they are `strides` apart.

    `array` returns them in the shape `sizes`: memory as it is, or a copy.
    """

    at: int
    item: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    array: Callable[[], RawArray]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.item

    @property
    def end(self) -> int:
        """The byte after the last one."""
        steps = zip(self.sizes, self.strides, strict=True)
        return self.at + self.item + sum((size - 1) * stride for size, stride in steps)

    def put(self, array: RawArray, buffer: RawArray) -> None:
        """Copy the elements to their place in the buffer of the block."""
        view: RawArray = np.ndarray(
            self.sizes, dtype=f"u{self.item}", buffer=buffer.data, offset=self.at, strides=self.strides
        )
        view[...] = array


class HeadedBlock(PlannedBlock, Protocol):
    """A block, and the header bytes with which it begins."""

    @property
    def header(self) -> bytes: ...


class Gatherer:
    """Gathers blocks one after another, through one buffer that is created on demand. Each thread has one."""

    def __init__(self) -> None:
        self._buffer: RawArray = np.empty(0, dtype=np.uint8)

    def block(self, block: HeadedBlock, fragments: Iterable[Fragment]) -> Iterator[memoryview]:
        """Yield the bytes of a block in order, valid until the next call. Contiguous memory is not copied."""
        if block.header:
            yield memoryview(block.header)
        position = len(block.header)
        for group in _interleaved(sorted(fragments, key=lambda fragment: fragment.at)):
            begin, end = group[0].at, max(fragment.end for fragment in group)
            if begin != position or sum(fragment.bytes for fragment in group) != end - begin:
                raise HoldfastError(f"{block.file} at {block.offset + position}: no rank provides these bytes")
            yield self._bytes(group, block.size, begin, end)
            position = end
        if position != block.size:
            raise HoldfastError(f"{block.file} at {block.offset}: gathered {position} of {block.size} bytes")

    def _bytes(self, group: Sequence[Fragment], size: int, begin: int, end: int) -> memoryview:
        first = group[0].array()
        if len(group) == 1 and first.flags.c_contiguous:
            return bytes_of(first)
        if self._buffer.size < size:
            self._buffer = aligned_buffer(size)
        group[0].put(first, self._buffer)
        for fragment in group[1:]:
            fragment.put(fragment.array(), self._buffer)
        return self._buffer[begin:end].data


def _interleaved(fragments: Iterable[Fragment]) -> Iterator[list[Fragment]]:
    """Group fragments, in the order of their first bytes, whose ranges of bytes overlap."""
    group: list[Fragment] = []
    end = 0
    for fragment in fragments:
        if group and fragment.at >= end:
            yield group
            group = []
        group.append(fragment)
        end = max(end, fragment.end)
    if group:
        yield group


def write_travel_file(storage: Storage, attempt: str, name: str, size: int, fragments: Iterable[Fragment]) -> None:
    """Write a file with bytes for the writers of another host to the attempt's folder."""
    storage.create(attempt, name, size)
    writer = storage.writer(attempt, name)
    try:
        _write_fragments(writer, fragments)
        if storage.whole_files:
            writer.sync()
    finally:
        writer.close()


def _write_fragments(writer: Writer, fragments: Iterable[Fragment]) -> None:
    """Write contiguous fragments, in order, each at its offset, with zeros between them."""
    parts: list[memoryview] = []
    begin = position = 0
    for fragment in fragments:
        if parts and fragment.end - begin > _TRAVEL_BYTES:
            writer.write(begin, parts)
            parts, begin = [], position
        if fragment.at > position:
            parts.append(memoryview(bytes(fragment.at - position)))
        parts.append(bytes_of(np.ascontiguousarray(fragment.array())))
        position = fragment.end
    if parts:
        writer.write(begin, parts)
