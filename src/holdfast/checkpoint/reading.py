"""Reads of a load plan: mapped or read portions, verified and copied to their destinations, shared within a host.

Files of this host are mapped. The page cache holds every byte once for all ranks, each rank
copies its parts directly from it, and one rank of the host verifies each block. Files that
cannot be mapped are read: directly into live memory if only one rank needs the bytes, otherwise
into a window of shared memory from which all ranks copy (see host_windows.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from holdfast.checkpoint.host_windows import WindowExchange
from holdfast.core.errors import Damaged, HoldfastError, error_from_record, error_record
from holdfast.core.limits import MIB
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format.digest import Digest
from holdfast.layout.box import Box
from holdfast.plan.files import (
    Place,
    RawArray,
    ShardDestination,
    ShardPiece,
    aligned_buffer,
    bytes_of,
    part_of,
    piece_in_run,
    raw_dtype,
)
from holdfast.plan.load_plan import Portion, Read
from holdfast.storage.base import Reader
from holdfast.storage.open_files import open_limit

PORTION_BYTES = 2 * MIB
MAP_BYTES = 64 * MIB
_NO_MAP: tuple[str, int, RawArray] = ("", 0, np.empty(0, dtype=np.uint8))

Destinations = Mapping[tuple[Place, Box], Sequence[ShardDestination]]
Progress = Callable[[int], None]


class LoadSource(Protocol):
    """A checkpoint whose files a load reads."""

    @property
    def path(self) -> str: ...

    def open_file(self, name: str) -> Reader: ...


@dataclass(slots=True)
class Loaded:
    """The bytes that this rank read, the files whose tensors it filled, and its first failure."""

    read_bytes: int = 0
    failure: HoldfastError | None = None
    touched: set[str] = field(default_factory=set)


class Loading:
    """One rank's share of a load plan. Collective: every rank takes part, even without anything to read."""

    def __init__(self, ranks: Ranks, source: LoadSource, destinations: Destinations, progress: Progress) -> None:
        self._ranks = ranks
        self._source = source
        self._destinations = destinations
        self._progress = progress
        self._files: OrderedDict[str, Reader] = OrderedDict()
        self._most_files = open_limit()
        self._map = _NO_MAP
        self._digest: Digest | None = None
        self._loaded = Loaded()

    def run_mapped(self, reads: Sequence[Read]) -> Loaded:
        """Copy this host's reads from mapped files; needs no communication with other ranks."""
        try:
            for read in reads:
                if read.reader == self._ranks.rank or any(self._ranks.rank in p.receivers() for p in read.portions):
                    self._guarded(partial(self._copy_mapped, read))
        finally:
            self._close()
        return self._loaded

    def run_read(self, reads: Sequence[Read], neighbours: Sequence[int], deadline_s: float) -> Loaded:
        """Perform the reads of this host, whose ranks are `neighbours`. Collective among all ranks."""
        rank = self._ranks.rank
        queue = [(read, portion) for read in reads if read.reader == rank for portion in read.portions]
        shared = any(portion.receivers() - {read.reader} for read in reads for portion in read.portions)
        try:
            if any(run_on_all_ranks(self._ranks, lambda: shared)):
                exchange = WindowExchange(self._ranks, neighbours, PORTION_BYTES, deadline_s)
                self._run_shared(exchange, reads, queue)
            else:
                self._run_unshared(queue)
        finally:
            self._close()
        return self._loaded

    def _close(self) -> None:
        self._map = _NO_MAP
        while self._files:
            self._files.popitem()[1].close()

    def _copy_mapped(self, read: Read) -> None:
        own = read.reader == self._ranks.rank
        digest = Digest() if own and read.digest else None
        for portion in read.portions:
            if own:
                size = sum(size for _, size in portion.ranges)
                self._loaded.read_bytes += size
                self._progress(size)
            if digest is not None:
                data = np.frombuffer(self._file(read.file).map(portion.offset, portion.size, whole=True), np.uint8)
                digest.update(data.data)
                self._scatter(portion, data)
            else:
                self._scatter_mapped(read.file, portion)
        if digest is not None:
            _check(read, digest.hexdigest(), self._source.path)

    def _scatter_mapped(self, name: str, portion: Portion) -> None:
        """Copy this rank's pieces: large ones from their own map, the rest from a shared map."""
        for piece in portion.pieces:
            if piece.rank != self._ranks.rank:
                continue
            if piece.part == piece.run.box and piece.bytes >= MIB:
                view = self._file(name).map(portion.offset + piece.run.at, piece.bytes, whole=True)
                self._put(piece, np.frombuffer(view, raw_dtype(piece.run.place)).reshape(piece.part.sizes))
            else:
                self._put(piece, piece_in_run(self._mapped(name, portion.offset, portion.size), piece))

    def _mapped(self, name: str, offset: int, size: int) -> RawArray:
        """Return bytes of a mapped file; one range stays mapped, since mapping costs more than a small copy."""
        file, begin, array = self._map
        if file != name or offset < begin or offset + size > begin + array.nbytes:
            self._map = _NO_MAP  # release the old map before creating the new one
            reader = self._file(name)
            begin = offset
            array = np.frombuffer(reader.map(begin, min(MAP_BYTES, reader.size - begin)), dtype=np.uint8)
            self._map = (name, begin, array)
        return array[offset - begin : offset - begin + size]

    def _run_unshared(self, queue: Sequence[tuple[Read, Portion]]) -> None:
        scratch = aligned_buffer(PORTION_BYTES if queue else 0)
        for read, portion in queue:
            self._guarded(partial(self._read, read, portion, scratch))

    def _run_shared(
        self, exchange: WindowExchange, reads: Sequence[Read], queue: Sequence[tuple[Read, Portion]]
    ) -> None:
        scratch = aligned_buffer(PORTION_BYTES)
        portions = [(read.reader, portion) for read in reads for portion in read.portions]
        numbers = {id(portion): number for number, (_, portion) in enumerate(portions)}
        rank = self._ranks.rank
        expected = sum(1 for reader, portion in portions if reader != rank and rank in portion.receivers())

        def receive(number: int, window: RawArray) -> None:
            self._guarded(partial(self._scatter, portions[number][1], window))

        with exchange.opened(expected, receive):
            for read, portion in queue:
                receivers = portion.receivers() - {rank}
                if not receivers:
                    exchange.serve()
                    self._guarded(partial(self._read, read, portion, scratch))
                    continue
                slot, window = exchange.free_slot()
                good = self._guarded(partial(self._read_window, read, portion, window))
                exchange.announce(numbers[id(portion)], slot, receivers, good=good)
                if good and rank in portion.receivers():
                    self._guarded(partial(self._scatter, portion, window))

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Keep the first failure for later: a rank that stops early would leave other ranks waiting."""
        if self._loaded.failure is not None:
            return False
        try:
            work()
        except HoldfastError as error:
            self._loaded.failure = error
        except Exception as error:  # noqa: BLE001  (other ranks wait for this one, whatever failed)
            self._loaded.failure = error_from_record(error_record(error))
            self._loaded.failure.__cause__ = error
        return self._loaded.failure is None

    def _file(self, name: str) -> Reader:
        """Return an open file. Only one thread uses the files, so any other may be closed; maps stay valid."""
        if name not in self._files:
            while len(self._files) >= self._most_files:
                self._files.popitem(last=False)[1].close()
            self._files[name] = self._source.open_file(name)
        self._files.move_to_end(name)
        return self._files[name]

    def _read(self, read: Read, portion: Portion, scratch: RawArray) -> None:
        """Read a portion that only this rank needs."""
        direct = self._direct_spans(portion)
        if direct:
            self._loaded.touched.add(read.file)
        self._fill(read, portion, list(_layer(portion, direct, scratch)))
        for piece in portion.pieces:
            if id(piece) not in direct:
                self._put(piece, piece_in_run(scratch, piece))

    def _read_window(self, read: Read, portion: Portion, window: RawArray) -> None:
        spans = [(start, [window[start : start + size].data]) for start, size in portion.ranges]
        self._fill(read, portion, spans)

    def _scatter(self, portion: Portion, window: RawArray) -> None:
        for piece in portion.pieces:
            if piece.rank == self._ranks.rank:
                self._put(piece, piece_in_run(window, piece))

    def _fill(self, read: Read, portion: Portion, spans: Sequence[tuple[int, list[memoryview]]]) -> None:
        """Read spans of a portion into buffers; digest them in order if the block is verified."""
        file = self._file(read.file)
        if portion is read.portions[0]:
            self._digest = Digest() if read.digest else None
        for start, buffers in spans:
            file.read_into(portion.offset + start, buffers)
            size = sum(buffer.nbytes for buffer in buffers)
            self._loaded.read_bytes += size
            self._progress(size)
            if self._digest is not None:
                for buffer in buffers:
                    self._digest.update(buffer)
        if portion is read.portions[-1] and self._digest is not None:
            _check(read, self._digest.hexdigest(), self._source.path)

    def _direct_spans(self, portion: Portion) -> dict[int, memoryview]:
        """Return the pieces that can be read directly into live memory, by identity: the only ones of their run."""
        out = {}
        runs = Counter(piece.run for piece in portion.pieces)
        for piece in portion.pieces:
            found = self._destinations[piece.run.place, piece.held]
            array = found[0].direct() if len(found) == 1 and runs[piece.run] == 1 else None
            if array is None or piece.part != piece.run.box:
                continue
            target = part_of(array, piece.part, piece.held)
            if target.flags.c_contiguous and target.nbytes:
                out[id(piece)] = bytes_of(target)
        return out

    def _put(self, piece: ShardPiece, data: RawArray) -> None:
        self._loaded.touched.add(piece.run.place.file)
        part = piece.part.relative_to(piece.held)
        for destination in self._destinations[piece.run.place, piece.held]:
            destination.put(part, data)


def _layer(
    portion: Portion, direct: Mapping[int, memoryview], scratch: RawArray
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield the buffers that each range of a portion fills in order: live memory, else scratch."""
    found = [(piece.run.at, direct[id(piece)]) for piece in portion.pieces if id(piece) in direct]
    targets = sorted(found, key=lambda target: target[0])
    for start, size in portion.ranges:
        position, end = start, start + size
        buffers = []
        for at, target in targets:
            if at < start or at >= end:
                continue
            if at > position:
                buffers.append(scratch[position:at].data)
            buffers.append(target)
            position = at + target.nbytes
        if position < end:
            buffers.append(scratch[position:end].data)
        yield start, buffers


def _check(read: Read, found: str, path: str) -> None:
    if found == read.digest:
        return
    keys = sorted({piece.run.place.spec.key for portion in read.portions for piece in portion.pieces})
    raise Damaged(
        f"{path}/{read.file}: the block at {read.offset} ({read.size} bytes) has the digest {found}, "
        f"but the manifest records {read.digest}; it holds {', '.join(keys[:5])}{' ...' if len(keys) > 5 else ''}"
    )
