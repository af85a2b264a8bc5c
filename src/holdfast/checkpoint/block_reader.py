"""One thread's reads of blocks: in steps, digested and copied to the shards while they are in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.core.errors import Damaged
from holdfast.core.limits import MIB, PAGE_BYTES
from holdfast.format.digest import Digest
from holdfast.layout.box import Box
from holdfast.plan.byte_rows import ByteRows, rows_of
from holdfast.plan.files import (
    FlatDestination,
    Place,
    RawArray,
    ShardDestination,
    ShardPiece,
    byte_rows,
    piece_in_run,
)
from holdfast.plan.load_plan import Portion, Read
from holdfast.plan.staging import STEP_BYTES, ThreadBuffers
from holdfast.storage.base import PageCacheReader, Reader
from holdfast.storage.open_files import OpenReaders

_UNCACHED_BYTES = MIB // 4  # a smaller read is not worth a question to the kernel

Destinations = Mapping[tuple[Place, Box], Sequence[ShardDestination]]


class FlatDestinations:
    """The destinations of a load, each asked once whether it takes bytes."""

    def __init__(self, destinations: Destinations) -> None:
        self.all = destinations
        self._flat: dict[tuple[Place, Box], list[FlatDestination] | None] = {}

    def of(self, piece: ShardPiece) -> list[FlatDestination] | None:
        """Return the flat destinations of a piece; None if one of them takes elements only."""
        key = (piece.run.place, piece.held)
        if key not in self._flat:
            found = [destination.flat() for destination in self.all[key]]
            flat = [destination for destination in found if destination is not None]
            self._flat[key] = flat if len(flat) == len(found) else None
        return self._flat[key]

    def put(self, piece: ShardPiece, data: RawArray) -> None:
        """Store a piece, element by element, in each of its destinations."""
        part = piece.part.relative_to(piece.held)
        for destination in self.all[piece.run.place, piece.held]:
            destination.put(part, data)


@dataclass(slots=True)
class _Flow:
    """Rows of a portion on their way to flat destinations; with `memory` they are read straight into it."""

    rows: ByteRows
    targets: Sequence[FlatDestination]
    memory: RawArray | None


class BlockReader:
    """Reads for one thread of one rank."""

    def __init__(
        self,
        rank: int,
        path: str,
        files: OpenReaders[str],
        destinations: FlatDestinations,
        buffers: ThreadBuffers,
        touch: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._path = path
        self._files = files
        self._destinations = destinations
        self._buffers = buffers
        self._touch = touch

    def copy(self, read: Read) -> None:
        """Copy this rank's pieces of a read; if this rank is its reader and it has a digest, verify it."""
        digest = Digest() if read.digest is not None and read.reader == self._rank else None
        with self._files.using(read.file) as file:
            for portion in read.portions:
                self._copy_portion(file, read, portion, digest)
        if digest is not None:
            check_digest(read, digest.hexdigest(), self._path)

    def read_portion(self, read: Read, portion: Portion, digest: Digest | None) -> None:
        """Read a portion that only this rank needs, of at most one step, from a file that cannot be mapped."""
        flows, rest = self._flows(portion)
        if portion.pieces:
            self._touch(read.file)
        with self._files.using(read.file) as file:
            buffer = self._buffers.next()
            for start, size in portion.ranges:
                self._read_range(file, portion.offset, (start, start + size), buffer[start:], flows, digest)
        self._deliver(buffer, 0, portion.size, flows)
        for piece in rest:
            self._destinations.put(piece, piece_in_run(buffer, piece))
        self._buffers.sent()

    def _copy_portion(self, file: Reader, read: Read, portion: Portion, digest: Digest | None) -> None:
        flows, rest = self._flows(portion)
        if flows or rest:
            self._touch(read.file)
        if digest is not None:
            alone = not rest and portion.receivers() <= {self._rank}
            self._read_steps(file, portion.offset, 0, portion.size, flows, digest, alone=alone)
        else:
            for flow in flows:
                self._copy_flow(file, portion, flow)
        if rest:
            window = np.frombuffer(file.map(portion.offset, portion.size, whole=digest is not None), np.uint8)
            for piece in rest:
                self._destinations.put(piece, piece_in_run(window, piece))

    def _copy_flow(self, file: Reader, portion: Portion, flow: _Flow) -> None:
        """Copy rows that need no verification: neighbouring ones are read, sparse ones copied from a map."""
        rows = flow.rows
        if flow.memory is not None:
            memory = flow.memory[rows.shard_at : rows.shard_at + rows.width]
            file.read_into(portion.offset + rows.at, [memory.data])
            return
        if 2 * rows.bytes >= rows.end - rows.at:
            alone = portion.receivers() <= {self._rank}
            self._read_steps(file, portion.offset, rows.at, rows.end, [flow], None, alone=alone)
            return
        window = np.frombuffer(file.map(portion.offset + rows.at, rows.end - rows.at), np.uint8)
        for batch in rows.batches(STEP_BYTES):
            found = byte_rows(window, batch.at - rows.at, batch.pitch, batch.count, batch.width)
            data = found
            if any(target.memory is None for target in flow.targets):
                data = self._buffers.next()[: batch.bytes].reshape(found.shape)
                data[...] = found
            for target in flow.targets:
                target.write(batch.shard_at, batch.shard_pitch, data)
            self._buffers.sent()

    def _read_steps(
        self,
        file: Reader,
        offset: int,
        begin: int,
        end: int,
        flows: Sequence[_Flow],
        digest: Digest | None,
        *,
        alone: bool,
    ) -> None:
        """Read the bytes [begin, end) of a portion at `offset` step by step, and deliver each step.

        `alone` says that no other rank of the host reads them too: then they need not enter the page cache.
        """
        uncached = file if alone and isinstance(file, PageCacheReader) else None
        for at in range(begin, end, STEP_BYTES):
            stop = min(at + STEP_BYTES, end)
            buffer = self._buffers.next()
            if uncached is not None and self._read_uncached(uncached, offset + at, stop - at, buffer):
                if digest is not None:
                    digest.update(buffer[: stop - at].data)
                self._deliver(buffer, at, stop, flows, into_memory=True)
            else:
                self._read_range(file, offset, (at, stop), buffer, flows, digest)
                self._deliver(buffer, at, stop, flows)
            self._buffers.sent()

    def _read_uncached(self, file: PageCacheReader, offset: int, size: int, buffer: RawArray) -> bool:
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        if offset % PAGE_BYTES or size < _UNCACHED_BYTES or pages > buffer.nbytes:
            return False
        return file.read_uncached(offset, buffer[:pages].data)

    def _read_range(
        self,
        file: Reader,
        offset: int,
        span: tuple[int, int],
        buffer: RawArray,
        flows: Iterable[_Flow],
        digest: Digest | None,
    ) -> None:
        """Read a range of a portion into the memory of its shards, or else into the buffer, which begins with it."""
        buffers = list(_layered(span, buffer, flows))
        file.read_into(offset + span[0], buffers)
        if digest is not None:
            for part in buffers:
                digest.update(part)

    def _deliver(
        self, buffer: RawArray, begin: int, end: int, flows: Iterable[_Flow], *, into_memory: bool = False
    ) -> None:
        """Copy the rows in the bytes [begin, end) of a portion from the buffer to their destinations."""
        for flow in flows:
            if flow.rows.end <= begin or flow.rows.at >= end or (flow.memory is not None and not into_memory):
                continue
            for rows in flow.rows.within(begin, end):
                data = byte_rows(buffer, rows.at - begin, rows.pitch, rows.count, rows.width)
                for target in flow.targets:
                    ready = data if target.memory is not None else self._buffers.gather(data)
                    target.write(rows.shard_at, rows.shard_pitch, ready)

    def _flows(self, portion: Portion) -> tuple[list[_Flow], list[ShardPiece]]:
        """Return how this rank's pieces of a portion flow as bytes, in order, and the pieces that do not."""
        flows: list[_Flow] = []
        rest: list[ShardPiece] = []
        for piece in portion.pieces:
            if piece.rank != self._rank:
                continue
            flat = self._destinations.of(piece)
            if flat is None:
                rest.append(piece)
            else:
                flows += (_Flow(rows, flat, None) for rows in rows_of(piece))
        flows.sort(key=lambda flow: flow.rows.at)
        reach = 0
        for number, flow in enumerate(flows):
            after = flows[number + 1].rows.at if number + 1 < len(flows) else portion.size
            if flow.rows.count == 1 and len(flow.targets) == 1 and reach <= flow.rows.at and flow.rows.end <= after:
                flow.memory = flow.targets[0].memory
            reach = max(reach, flow.rows.end)
        if rest and flows:  # pieces that take elements may need the same bytes, from the buffer
            taken = {(piece.run.at, piece.run.at + piece.run.bytes) for piece in rest}
            for flow in flows:
                if any(flow.rows.at < end and begin < flow.rows.end for begin, end in taken):
                    flow.memory = None
        return flows, rest


def _layered(span: tuple[int, int], buffer: RawArray, flows: Iterable[_Flow]) -> Iterator[memoryview]:
    """Yield the memory that the bytes of a span fill in order: that of shards, and the buffer between them."""
    begin, end = span
    position = begin
    for flow in flows:
        rows = flow.rows
        if flow.memory is None or rows.end <= begin or rows.at >= end:
            continue
        at, stop = max(rows.at, begin), min(rows.end, end)
        if at > position:
            yield buffer[position - begin : at - begin].data
        yield flow.memory[rows.shard_at + at - rows.at : rows.shard_at + stop - rows.at].data
        position = stop
    if position < end:
        yield buffer[position - begin : end - begin].data


def check_digest(read: Read, found: str, path: str) -> None:
    """Raise Damaged unless a block has the digest that the manifest records."""
    if found == read.digest:
        return
    keys = sorted({piece.run.place.spec.key for portion in read.portions for piece in portion.pieces})
    raise Damaged(
        f"{path}/{read.file}: the block at {read.offset} ({read.size} bytes) has the digest {found}, "
        f"but the manifest records {read.digest}; it holds {', '.join(keys[:5])}{' ...' if len(keys) > 5 else ''}"
    )
