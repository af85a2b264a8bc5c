"""Arenas that survived their trainers, opened as a read-only checkpoint: files assembled from arena blocks.

Files are assembled from the arenas as they are read. Every block has its digest in the cards, so
a change of memory since is found like damage on a disk.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.gather import Gatherer
from holdfast.checkpoint.shared_memory import Arena, sealed_attempt
from holdfast.core.errors import Damaged, NotFound
from holdfast.core.limits import MIB
from holdfast.core.names import MANIFEST, step_folder
from holdfast.format.manifest import encode_manifest
from holdfast.plan.writer_job import BlockJob
from holdfast.storage import linux
from holdfast.writer.arena_card import Card
from holdfast.writer.arena_fragments import Bytes, block_fragments, is_direct

_COPIED_BYTES = 8 * MIB  # of a portion that cannot be copied straight into live memory


class _LastBlock(threading.local):
    """The block that a thread read last: its parts in order, views of arenas or one gathered buffer, and their ends.

    All files of a checkpoint share it, so that each thread holds one block.
    """

    block: BlockJob | None = None
    gatherer: Gatherer | None = None
    parts: Sequence[Bytes] = ()
    ends: Sequence[int] = ()


class _Arenas:
    """The arenas of a checkpoint, and the block that each thread read last."""

    def __init__(self, memory: Mapping[int, Bytes], blocks: Iterable[BlockJob]) -> None:
        self._memory = memory
        self._last = _LastBlock()
        gathered = max((block.size for block in blocks if not is_direct(block)), default=0)
        self.thread_bytes = gathered + _COPIED_BYTES

    def bytes_of(self, block: BlockJob, skip: int) -> Bytes:
        """Return the bytes of a block from `skip` to the end of the part that has them; none past the end."""
        last = self._last
        if last.block is not block:
            last.block = None
            last.gatherer = last.gatherer or Gatherer()
            gathered = last.gatherer.block(block, block_fragments(block, self._memory, {}))
            last.parts = [np.frombuffer(part, dtype=np.uint8) for part in gathered]
            if is_direct(block):
                for part in last.parts:
                    linux.populate(part.ctypes.data, part.size, write=False)
            last.ends = list(itertools.accumulate(part.size for part in last.parts))
            last.block = block
        number = bisect.bisect_right(last.ends, skip)
        if number == len(last.parts):
            return np.empty(0, np.uint8)
        part = last.parts[number]
        return part[part.size - (last.ends[number] - skip) :]


class CapturedFile:
    """A tensor file that exists only as blocks of arenas."""

    mappable = False

    def __init__(self, blocks: Sequence[BlockJob], arenas: _Arenas) -> None:
        self._blocks = sorted(blocks, key=lambda block: block.offset)
        self._begins = [block.offset for block in self._blocks]
        self._arenas = arenas
        self.size = self._blocks[-1].offset + self._blocks[-1].size
        self.thread_bytes = arenas.thread_bytes

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        buffer = memoryview(bytearray(size))
        self.read_into(offset, [buffer])
        return buffer

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            target = np.frombuffer(buffer.cast("B"), dtype=np.uint8)
            position = 0
            while position < target.size:
                index = bisect.bisect_right(self._begins, offset) - 1
                source = self._arenas.bytes_of(self._blocks[index], offset - self._begins[index])
                count = min(source.size, target.size - position)
                if not count:
                    raise Damaged(f"a captured file ends at {offset}, {target.size - position} bytes too early")
                target[position : position + count] = source[:count]
                position += count
                offset += count

    def close(self) -> None:
        """Do nothing: no file is open."""


class SmallFile:
    """A file in this process's memory."""

    mappable = False

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        return memoryview(self._data)[offset : offset + size]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            buffer.cast("B")[:] = self._data[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def close(self) -> None:
        """Do nothing: no file is open."""


class CapturedStorage:
    """A read-only storage with one folder: the step that the arenas hold."""

    name = "the memory of this host"

    def __init__(self, cards: Sequence[Card]) -> None:
        commit = next((card.commit for card in cards if card.commit is not None), None)
        if commit is None:
            raise Damaged("the arenas of this host lack the card of rank 0, which describes them")
        arenas = {card.rank: Arena(card.arena, card.job.arena_bytes[card.rank], writable=False).bytes for card in cards}
        if any(sealed_attempt(memory) != cards[0].attempt for memory in arenas.values()):
            raise Damaged("an arena of this host was filled anew since its card was written")
        reports = [report for card in cards for report in card.reports]
        values = [card.values for card in cards]
        first = cards[0]
        manifest, small = commit.manifest(first.attempt, first.lineage, reports, values)
        self.folder = step_folder(first.step)
        self._small = {**small, MANIFEST: encode_manifest(manifest)}
        self._blocks: dict[str, list[BlockJob]] = {}
        for card in cards:
            for block in card.job.blocks:
                self._blocks.setdefault(block.file, []).append(block)
        self._arenas = _Arenas(arenas, itertools.chain.from_iterable(self._blocks.values()))

    def pin(self, folder: str) -> Self:
        return self

    def hold(self) -> Self:
        return self

    def release(self) -> None:
        """Do nothing: the arenas stay until what they hold is written, or superseded."""

    def open(self, name: str) -> CapturedFile | SmallFile:
        if name in self._blocks:
            return CapturedFile(self._blocks[name], self._arenas)
        return SmallFile(self.read(name, 0))

    def files(self) -> dict[str, int]:
        return {name: self.open(name).size for name in (*self._blocks, *self._small)}

    def read(self, name: str, limit_bytes: int) -> bytes:
        if name not in self._small:
            raise NotFound(f"{self.name} has no file {name}")
        return self._small[name]


def captured_checkpoint(cards: Sequence[Card]) -> Checkpoint:
    """Open the checkpoint that the arenas of these cards hold; raises Damaged if they hold none."""
    storage = CapturedStorage(cards)
    return Checkpoint(storage, storage.folder)
