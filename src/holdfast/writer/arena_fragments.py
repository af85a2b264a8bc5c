"""The fragments of a writer job: strided views of the arenas of a host, and reads of other hosts' travel files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.gather import Fragment
from holdfast.plan.files import RawArray, aligned_buffer
from holdfast.plan.writer_job import BlockJob, Copy
from holdfast.storage.base import Reader

Bytes = npt.NDArray[np.uint8]


def is_direct(block: BlockJob) -> bool:
    """Return True if a block consists of contiguous byte ranges of arenas, so that it needs no buffer."""
    return not block.remote and all(copy.flat for copy in block.local)


def block_fragments(
    block: BlockJob, arenas: Mapping[int, Bytes], travel_files: Mapping[int, Reader]
) -> Iterator[Fragment]:
    """Yield the fragments of a block."""
    for copy in block.local:
        yield arena_fragment(copy, arenas[copy.source_rank])
    for copy in block.remote:
        yield _fragment(copy, partial(_read, copy, travel_files))


def arena_fragment(copy: Copy, arena: Bytes) -> Fragment:
    """Return the fragment that a copy out of an arena makes."""
    return _fragment(copy, partial(_view, copy, arena, copy.source))


def _fragment(copy: Copy, array: Any) -> Fragment:
    return Fragment(copy.target, copy.item, copy.sizes, copy.target_strides, array)


def _read(copy: Copy, travel_files: Mapping[int, Reader]) -> RawArray:
    piece = aligned_buffer(copy.bytes)
    travel_files[copy.source_rank].read_into(copy.source, [piece.data])
    return _view(copy, piece, 0)


def _view(copy: Copy, memory: Bytes, offset: int) -> RawArray:
    return np.ndarray(copy.sizes, dtype=f"u{copy.item}", buffer=memory.data, offset=offset, strides=copy.source_strides)
