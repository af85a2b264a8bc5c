"""One thread's reads of blocks: a buffer at a time, digested and copied while it is in the processor's cache."""

from __future__ import annotations

from collections import deque
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
from holdfast.plan.load_plan import GAP_BYTES, Portion, Read
from holdfast.plan.staging import ThreadBuffers
from holdfast.storage.base import PageCacheReader, Reader
from holdfast.storage.open_files import OpenReaders

_UNCACHED_BYTES = MIB // 4  # a smaller read is not worth a question to the kernel
# A delivery is dense if its rows are at least 1/2 (host) or 1/16 (device) of the range that they span.
_HOST_DENSITY = 2
_DEVICE_DENSITY = 16
_PUT_BYTES = 2 * MIB
_CACHED_BYTES = MIB  # the processor's cache holds them
_WINDOW_BYTES = 32 * MIB  # copying from a map that is populated in one go is faster than a read

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
        """Store a piece in each of its destinations, a few rows at a time: a destination may copy what it gets."""
        part = piece.part.relative_to(piece.held)
        rows = max(1, _PUT_BYTES * data.shape[0] // data.nbytes) if data.ndim and data.nbytes else 1
        for begin in range(0, data.shape[0] if data.ndim else 1, rows):
            some, values = part, data
            if data.ndim:
                values = data[begin : begin + rows]
                offsets = (part.offsets[0] + begin, *part.offsets[1:])
                some = Box(offsets, (len(values), *part.sizes[1:]))
            for destination in self.all[piece.run.place, piece.held]:
                destination.put(some, values)


@dataclass(slots=True)
class _Delivery:
    """Rows of a portion on their way to flat destinations; with `memory` they are read straight into it."""

    rows: ByteRows
    targets: Sequence[FlatDestination]
    memory: RawArray | None = None

    @property
    def on_device(self) -> bool:
        return any(target.memory is None for target in self.targets)

    @property
    def is_dense(self) -> bool:
        """True if reading the rows with the gaps between them costs less than copying them from a map."""
        density = _DEVICE_DENSITY if self.on_device else _HOST_DENSITY
        return density * self.rows.bytes >= self.rows.end - self.rows.at


class BlockReader:
    """Reads for one thread of one rank."""

    def __init__(
        self,
        rank: int,
        path: str,
        files: OpenReaders[str],
        destinations: FlatDestinations,
        buffers: ThreadBuffers,
        buffer_bytes: int,
        touch: Callable[[str], None] = lambda file: None,
    ) -> None:
        self._rank = rank
        self._path = path
        self._files = files
        self._destinations = destinations
        self._buffers = buffers
        self._buffer_bytes = buffer_bytes
        self._touch = touch

    def copy(self, read: Read) -> None:
        """Copy this rank's pieces of a read; if this rank is its reader and it has a digest, verify it."""
        digest = Digest() if read.digest is not None and read.reader == self._rank else None
        with self._files.using(read.file) as file:
            for portion in read.portions:
                self._copy_portion(file, read, portion, digest)
        if digest is not None:
            check_digest(read, digest.hexdigest(), self._path)

    def parts(self, file: Reader, offset: int, size: int) -> Iterator[RawArray]:
        """Yield a range of a file, a buffer at a time. Nothing is mapped: a bad disk raises instead of a signal."""
        past_cache = self._past_cache(file, offset, (0, size))
        for at in range(0, size, self._buffer_bytes):
            buffer = self._buffers.next()
            part = buffer[: size - at]
            if past_cache is None or not self._read_uncached(past_cache, offset + at, part.nbytes, buffer):
                file.read_into(offset + at, [part.data])
            yield part
            self._buffers.sent()

    def read_portion(self, read: Read, portion: Portion, digest: Digest | None) -> None:
        """Read a portion that only this rank needs, of at most one buffer, from a file that cannot be mapped."""
        deliveries, rest = self._deliveries(portion)
        if portion.pieces:
            self._touch(read.file)
        if rest:  # pieces that take elements may need the same bytes, from the buffer
            for delivery in deliveries:
                delivery.memory = None
        with self._files.using(read.file) as file:
            buffer = self._buffers.next()
            for start, size in portion.ranges:
                self._read_range(file, portion.offset, (start, start + size), buffer[start:], deliveries, digest)
        self._deliver(buffer, 0, portion.size, deliveries)
        for piece in rest:
            self._destinations.put(piece, piece_in_run(buffer, piece))
        self._buffers.sent()

    def next_buffer(self) -> RawArray:
        """Return a buffer to fill with a portion; `deliver` follows, unless the portion is not for this rank."""
        return self._buffers.next()

    def fill(self, buffer: RawArray, read: Read, portion: Portion, digest: Digest | None) -> None:
        """Read a portion of at most one buffer."""
        with self._files.using(read.file) as file:
            for start, size in portion.ranges:
                part = buffer[start : start + size].data
                file.read_into(portion.offset + start, [part])
                if digest is not None:
                    digest.update(part)

    def deliver(self, buffer: RawArray, read: Read, portion: Portion) -> None:
        """Copy this rank's pieces of a portion from its buffer."""
        deliveries, rest = self._deliveries(portion)
        if deliveries or rest:
            self._touch(read.file)
        self._deliver(buffer, 0, portion.size, deliveries, into_memory=True)
        for piece in rest:
            self._destinations.put(piece, piece_in_run(buffer, piece))
        self._buffers.sent()

    def _copy_portion(self, file: Reader, read: Read, portion: Portion, digest: Digest | None) -> None:
        deliveries, rest = self._deliveries(portion)
        if deliveries or rest:
            self._touch(read.file)
        alone = portion.receivers() | {read.reader} <= {self._rank}
        sparse: list[_Delivery] = []
        if digest is None:
            sparse = list(self._copy_dense(file, portion.offset, deliveries, alone=alone))
        elif not rest:
            self._copy_span(file, portion.offset, (0, portion.size), deliveries, digest, alone=alone)
        else:
            sparse = deliveries
        if sparse or rest:
            window = np.frombuffer(file.map(portion.offset, portion.size, whole=digest is not None), np.uint8)
            if digest is not None:  # of the very bytes that are copied: a second read may return others
                digest.update(window.data)
            for delivery in sparse:
                self._copy_sparse(window, delivery)
            for piece in rest:
                self._destinations.put(piece, piece_in_run(window, piece))

    def _copy_dense(
        self, file: Reader, offset: int, deliveries: Sequence[_Delivery], *, alone: bool
    ) -> Iterator[_Delivery]:
        """Copy neighboring rows that need no verification; yields the deliveries that are too sparse for that."""
        for group in _dense(deliveries):
            if len(group) > 1 or group[0].is_dense:
                begin, end = group[0].rows.at, max(delivery.rows.end for delivery in group)
                # A buffer never ends inside an element: tensors begin at multiples of 8 from the portion's begin.
                begin -= (offset + begin) % PAGE_BYTES if offset % 8 == 0 else begin % 8
                self._copy_span(file, offset, (begin, end), group, None, alone=alone)
            else:
                yield group[0]

    def _copy_sparse(self, window: RawArray, delivery: _Delivery) -> None:
        """Copy rows from a map of the portion."""
        for batch in delivery.rows.batches(self._buffer_bytes):
            data = byte_rows(window, batch.at, batch.pitch, batch.count, batch.width)
            if delivery.on_device:
                buffer = self._buffers.next()[: batch.bytes].reshape(data.shape)
                buffer[...] = data
                data = buffer
            for target in delivery.targets:
                target.write(batch.shard_at, batch.shard_pitch, data)
            self._buffers.sent()

    def _copy_span(
        self,
        file: Reader,
        offset: int,
        span: tuple[int, int],
        deliveries: Sequence[_Delivery],
        digest: Digest | None,
        *,
        alone: bool,
    ) -> None:
        """Copy the bytes of a span of a portion at `offset`, and digest them: past the cache, by reads, or from maps.

        `alone` says that no other rank of the host reads them too: then they need not enter the page cache.
        """
        past_cache = self._past_cache(file, offset, span) if alone else None
        if past_cache is not None or not file.mappable or any(delivery.on_device for delivery in deliveries):
            self._read_through_buffers(file, offset, span, deliveries, digest, past_cache)
            return
        for at in range(span[0], span[1], _WINDOW_BYTES):
            stop = min(at + _WINDOW_BYTES, span[1])
            window = np.frombuffer(file.map(offset + at, stop - at, whole=True), np.uint8)
            if digest is None:
                self._deliver(window, at, stop, deliveries, into_memory=True)
            else:
                self._digest_and_deliver(window, at, deliveries, digest)

    def _digest_and_deliver(
        self, window: RawArray, begin: int, deliveries: Sequence[_Delivery], digest: Digest
    ) -> None:
        """Digest and copy the bytes of a window that begins at `begin`, each while it is in the processor's cache."""
        for at in range(0, window.nbytes, _CACHED_BYTES):
            part = window[at : at + _CACHED_BYTES]
            digest.update(part.data)
            self._deliver(part, begin + at, begin + at + part.nbytes, deliveries, into_memory=True)

    def _past_cache(self, file: Reader, offset: int, span: tuple[int, int]) -> PageCacheReader | None:
        """Return the file if a span of it is to be read past the page cache."""
        size = span[1] - span[0]
        if not isinstance(file, PageCacheReader) or size < _UNCACHED_BYTES or (offset + span[0]) % PAGE_BYTES:
            return None
        return None if file.is_cached(offset + span[0], size) else file

    def _read_through_buffers(
        self,
        file: Reader,
        offset: int,
        span: tuple[int, int],
        deliveries: Sequence[_Delivery],
        digest: Digest | None,
        past_cache: PageCacheReader | None,
    ) -> None:
        """Read a span into live memory or buffers, and deliver each buffer before the next is read."""
        waiting = deque(deliveries)
        for at in range(span[0], span[1], self._buffer_bytes):
            stop = min(at + self._buffer_bytes, span[1])
            while waiting and waiting[0].rows.end <= at:
                waiting.popleft()
            buffer = self._buffers.next()
            uncached = past_cache is not None and self._read_uncached(past_cache, offset + at, stop - at, buffer)
            if not uncached:
                self._read_range(file, offset, (at, stop), buffer, waiting, digest)
            elif digest is not None:
                digest.update(buffer[: stop - at].data)
            self._deliver(buffer, at, stop, waiting, into_memory=uncached)
            self._buffers.sent()

    def _read_uncached(self, file: PageCacheReader, offset: int, size: int, buffer: RawArray) -> bool:
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        return file.read_uncached(offset, buffer[:pages].data)

    def _read_range(
        self,
        file: Reader,
        offset: int,
        span: tuple[int, int],
        buffer: RawArray,
        deliveries: Iterable[_Delivery],
        digest: Digest | None,
    ) -> None:
        """Read a range of a portion into the memory of its shards, or else into the buffer, which begins with it."""
        buffers = list(_layered(span, buffer, deliveries))
        file.read_into(offset + span[0], buffers)
        if digest is not None:
            for part in buffers:
                digest.update(part)

    def _deliver(
        self, buffer: RawArray, begin: int, end: int, deliveries: Iterable[_Delivery], *, into_memory: bool = False
    ) -> None:
        """Copy the rows in the bytes [begin, end) of a portion from the buffer to their destinations."""
        for delivery in deliveries:
            if delivery.rows.at >= end:
                break
            if delivery.rows.end <= begin or (delivery.memory is not None and not into_memory):
                continue
            for rows in delivery.rows.within(begin, end):
                data = byte_rows(buffer, rows.at - begin, rows.pitch, rows.count, rows.width)
                for target in delivery.targets:
                    target.write(rows.shard_at, rows.shard_pitch, data)

    def _deliveries(self, portion: Portion) -> tuple[list[_Delivery], list[ShardPiece]]:
        """Return the deliveries of this rank's pieces of a portion, in order, and the pieces that take elements."""
        deliveries: list[_Delivery] = []
        rest: list[ShardPiece] = []
        for piece in portion.pieces:
            if piece.rank != self._rank:
                continue
            flat = self._destinations.of(piece)
            if flat is None:
                rest.append(piece)
            else:
                deliveries += (_Delivery(rows, flat) for rows in rows_of(piece))
        deliveries.sort(key=lambda delivery: delivery.rows.at)
        reach = 0
        for number, delivery in enumerate(deliveries):
            after = deliveries[number + 1].rows.at if number + 1 < len(deliveries) else portion.size
            if (
                delivery.rows.count == 1
                and len(delivery.targets) == 1
                and reach <= delivery.rows.at
                and delivery.rows.end <= after
            ):
                delivery.memory = delivery.targets[0].memory
            reach = max(reach, delivery.rows.end)
        return deliveries, rest


def _dense(deliveries: Sequence[_Delivery]) -> Iterator[list[_Delivery]]:
    """Group deliveries that are read together: dense ones with small gaps between them. Sparse ones stand alone."""
    group: list[_Delivery] = []
    reach = 0
    for delivery in deliveries:
        if group and not (delivery.is_dense and group[-1].is_dense and delivery.rows.at - reach <= GAP_BYTES):
            yield group
            group = []
        group.append(delivery)
        reach = max(reach, delivery.rows.end)
    if group:
        yield group


def _layered(span: tuple[int, int], buffer: RawArray, deliveries: Iterable[_Delivery]) -> Iterator[memoryview]:
    """Yield the memory that the bytes of a span fill in order: that of shards, and the buffer between them."""
    begin, end = span
    position = begin
    for delivery in deliveries:
        rows = delivery.rows
        if rows.at >= end:
            break
        if delivery.memory is None or rows.end <= begin:
            continue
        at, stop = max(rows.at, begin), min(rows.end, end)
        if at > position:
            yield buffer[position - begin : at - begin].data
        yield delivery.memory[rows.shard_at + at - rows.at : rows.shard_at + stop - rows.at].data
        position = stop
    if position < end:
        yield buffer[position - begin : end - begin].data


def check_digest(read: Read, found: str, path: str) -> None:
    """Raise Damaged unless a block has the digest that the manifest records."""
    if found == read.digest:
        return
    keys = sorted({piece.run.place.spec.key for portion in read.portions for piece in portion.pieces})
    raise Damaged(
        f"{path}/{read.file}: the digest of the block at {read.offset} ({read.size} bytes) is not the one in the "
        f"manifest: its bytes have changed. It holds {', '.join(keys[:5])}{' ...' if len(keys) > 5 else ''}; "
        "`holdfast verify` names all damage"
    )
