"""Gathering of a block: direct views or strided copies from arenas of a host and travel files of other hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import HoldfastError
from holdfast.plan.files import aligned_buffer
from holdfast.plan.writer_job import BlockJob, Copy
from holdfast.storage.base import Reader

Bytes = npt.NDArray[np.uint8]


def is_direct(block: BlockJob) -> bool:
    """Return True if a block consists of contiguous byte ranges of arenas, so that it needs no buffer."""
    return not block.remote and all(copy.flat for copy in block.local)


class Gatherer:
    """Gathers blocks one after another, through one buffer that is created on demand."""

    def __init__(self, arenas: Mapping[int, Bytes], travel_files: Mapping[int, Reader]) -> None:
        self._arenas = arenas
        self._travel_files = travel_files
        self._buffer: Bytes | None = None

    def block(self, block: BlockJob) -> list[memoryview]:
        """Return the bytes of a block in order, valid until the next call."""
        buffers = self._direct(block) if is_direct(block) else [self._gathered(block)]
        size = sum(buffer.nbytes for buffer in buffers)
        if size != block.size:
            raise HoldfastError(f"{block.file} at {block.offset}: gathered {size} of {block.size} bytes")
        return buffers

    def _direct(self, block: BlockJob) -> list[memoryview]:
        buffers = [memoryview(block.header)] if block.header else []
        position = len(block.header)
        for copy in sorted(block.local, key=lambda copy: copy.target):
            if copy.target != position:
                raise HoldfastError(f"{block.file} at {block.offset + position}: no rank provides these bytes")
            buffers.append(self._arenas[copy.source_rank][copy.source : copy.source + copy.bytes].data)
            position += copy.bytes
        return buffers

    def _gathered(self, block: BlockJob) -> memoryview:
        if self._buffer is None or self._buffer.size < block.size:
            self._buffer = aligned_buffer(block.size)
        self._buffer[: len(block.header)] = np.frombuffer(block.header, dtype=np.uint8)
        for copy in block.local:
            copy_bytes(copy, self._arenas[copy.source_rank], self._buffer)
        for copy in block.remote:
            piece = aligned_buffer(copy.bytes)
            self._travel_files[copy.source_rank].read_into(copy.source, [piece.data])
            copy_bytes(replace(copy, source=0), piece, self._buffer)
        return self._buffer[: block.size].data


def copy_bytes(copy: Copy, source: Bytes, target: Bytes) -> None:
    """Copy bytes from one array of memory to another."""
    _view(target, copy.target, copy, copy.target_strides)[...] = _view(source, copy.source, copy, copy.source_strides)


def _view(memory: Bytes, offset: int, copy: Copy, strides: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.ndarray(copy.sizes, dtype=f"u{copy.item}", buffer=memory.data, offset=offset, strides=strides)
