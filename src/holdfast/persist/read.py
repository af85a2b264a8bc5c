"""Reading: bring the ranges of a load plan from storage into their destinations.

A block that only this rank takes from is read straight into live memory where that is
possible. Blocks that several ranks of a host need are read by one of them into a window of
shared memory, in rounds, and everyone copies its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from holdfast.core.errors import Damaged, HoldfastError, error_from_record, error_record
from holdfast.core.limits import MIB, WINDOWS_BYTES
from holdfast.core.ranks import Ranks, together
from holdfast.format.digest import Digest
from holdfast.layout.box import Box
from holdfast.persist.arena import Arena
from holdfast.plan.arrays import Destination, RawArray, aligned_buffer, part_of, piece_in_run
from holdfast.plan.files import Place
from holdfast.plan.load import Portion, Read
from holdfast.plan.pieces import Piece
from holdfast.storage.base import Reader

PORTION_BYTES = 4 * MIB

Destinations = Mapping[tuple[Place, Box], Sequence[Destination]]
Open = Callable[[str], Reader]
Progress = Callable[[int], None]


@dataclass(slots=True)
class Loaded:
    """What this rank read from storage, and the first thing it found wrong."""

    read_bytes: int = 0
    failure: HoldfastError | None = None


class Loading:
    """One rank's part in a load plan."""

    def __init__(self, ranks: Ranks, open_file: Open, destinations: Destinations, progress: Progress) -> None:
        self._ranks = ranks
        self._open = open_file
        self._destinations = destinations
        self._progress = progress
        self._files: dict[str, Reader] = {}
        self._loaded = Loaded()

    def run(self, reads: Sequence[Read], neighbours: Sequence[int]) -> Loaded:
        """Do the reads of this host; `neighbours` are its ranks. Collective among all ranks."""
        try:
            own = [read for read in reads if read.reader == self._ranks.rank and not read.shared]
            scratch = aligned_buffer(PORTION_BYTES if own else 0)
            for read in own:
                self._guarded(self._read_private, read, scratch)
            shared = [read for read in reads if read.shared]
            if any(together(self._ranks, lambda: bool(shared))):
                self._read_shared(shared, neighbours)
        finally:
            for file in self._files.values():
                file.close()
        return self._loaded

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """Keep the first failure for later: a rank that stops early would leave others waiting."""
        if self._loaded.failure is not None:
            return
        try:
            work(*arguments)
        except HoldfastError as error:
            self._loaded.failure = error
        except Exception as error:
            self._loaded.failure = error_from_record(error_record(error))
            self._loaded.failure.__cause__ = error

    def _file(self, name: str) -> Reader:
        if name not in self._files:
            self._files[name] = self._open(name)
        return self._files[name]

    def _read_private(self, read: Read, scratch: RawArray) -> None:
        file = self._file(read.file)
        digest = Digest() if read.digest else None
        for portion in read.portions:
            direct = self._direct_spans(portion)
            self._fill(file, portion, list(_layer(portion, direct, scratch)), digest)
            for piece in portion.pieces:
                if id(piece) not in direct:
                    self._put(piece, piece_in_run(scratch, piece))
        _check(read, digest)

    def _fill(self, file: Reader, portion: Portion, spans: list[tuple[int, list[memoryview]]], digest: Digest | None) -> None:
        for start, buffers in spans:
            file.read_into(portion.offset + start, buffers)
            size = sum(buffer.nbytes for buffer in buffers)
            self._loaded.read_bytes += size
            self._progress(size)
            if digest is not None:
                for buffer in buffers:
                    digest.update(buffer)

    def _direct_spans(self, portion: Portion) -> dict[int, memoryview]:
        """Pieces that may be read straight into live memory, by identity."""
        out = {}
        position = 0
        for piece in sorted(portion.pieces, key=lambda piece: piece.run.at):
            found = self._destinations[piece.run.place, piece.held]
            array = found[0].direct() if len(found) == 1 else None
            if array is None or piece.part != piece.run.box or piece.run.at < position:
                continue
            target = part_of(array, piece.part, piece.held)
            if target.flags.c_contiguous and target.nbytes:
                out[id(piece)] = memoryview(target.reshape(-1).view("u1"))
                position = piece.run.at + piece.bytes
        return out

    def _put(self, piece: Piece, data: RawArray) -> None:
        part = piece.part.relative_to(piece.held)
        for destination in self._destinations[piece.run.place, piece.held]:
            destination.put(part, data)

    def _read_shared(self, reads: Sequence[Read], neighbours: Sequence[int]) -> None:
        slots = max(1, WINDOWS_BYTES // (2 * PORTION_BYTES * max(1, len(neighbours))))
        half = slots * PORTION_BYTES
        with ExitStack() as stack:
            windows = self._windows(2 * half, neighbours, stack)
            queues = {rank: list(_queue(reads, rank)) for rank in neighbours}
            rounds = max((-(-len(queue) // slots) for queue in queues.values()), default=0)
            rounds = max(together(self._ranks, lambda: rounds))
            digests: dict[int, Digest] = {}
            for number in range(rounds):
                begin = number % 2 * half
                mine = queues[self._ranks.rank][number * slots : (number + 1) * slots]
                for slot, (read, portion) in enumerate(mine):
                    at = begin + slot * PORTION_BYTES
                    self._guarded(self._read_window, read, portion, windows[self._ranks.rank][at:], digests)
                # Everyone has filled this half; the other half is free again once the next round is met.
                together(self._ranks, lambda: None)
                for rank, queue in queues.items():
                    for slot, (_, portion) in enumerate(queue[number * slots : (number + 1) * slots]):
                        at = begin + slot * PORTION_BYTES
                        self._guarded(self._take_window, portion, windows[rank][at:])

    def _windows(self, size: int, neighbours: Sequence[int], stack: ExitStack) -> dict[int, RawArray]:
        own: list[Arena] = []

        def create() -> str:
            own.append(Arena.create(size))
            stack.callback(own[0].unlink)
            return own[0].name

        names = together(self._ranks, create)
        windows = {self._ranks.rank: own[0].bytes}

        def attach() -> None:
            for rank in neighbours:
                if rank != self._ranks.rank:
                    windows[rank] = Arena.attach(names[rank], size).bytes

        together(self._ranks, attach)
        return windows

    def _read_window(self, read: Read, portion: Portion, window: RawArray, digests: dict[int, Digest]) -> None:
        digest = digests.setdefault(id(read), Digest()) if read.digest else None
        spans = [(start, [memoryview(window[start : start + size])]) for start, size in portion.ranges]
        self._fill(self._file(read.file), portion, spans, digest)
        if portion is read.portions[-1]:
            _check(read, digest)
            digests.pop(id(read), None)

    def _take_window(self, portion: Portion, window: RawArray) -> None:
        for piece in portion.pieces:
            if piece.rank == self._ranks.rank:
                self._put(piece, piece_in_run(window, piece))


def _queue(reads: Sequence[Read], rank: int) -> Iterator[tuple[Read, Portion]]:
    for read in reads:
        if read.reader == rank:
            for portion in read.portions:
                yield read, portion


def _layer(
    portion: Portion, direct: Mapping[int, memoryview], scratch: RawArray
) -> Iterator[tuple[int, list[memoryview]]]:
    """For each range of a portion, the buffers that take it in turn: live memory, else scratch."""
    found = [(piece.run.at, direct[id(piece)]) for piece in portion.pieces if id(piece) in direct]
    targets = sorted(found, key=lambda target: target[0])
    for start, size in portion.ranges:
        position, end = start, start + size
        buffers = []
        for at, target in targets:
            if at < start or at >= end:
                continue
            if at > position:
                buffers.append(memoryview(scratch[position:at]))
            buffers.append(target)
            position = at + target.nbytes
        if position < end:
            buffers.append(memoryview(scratch[position:end]))
        yield start, buffers


def _check(read: Read, digest: Digest | None) -> None:
    if digest is None or read.digest is None:
        return
    found = digest.hex()
    if found != read.digest:
        keys = sorted({piece.run.place.spec.key for portion in read.portions for piece in portion.pieces})
        raise Damaged(
            f"{read.file}: the block at {read.block.offset} ({read.block.size} bytes) has the digest {found}, "
            f"the manifest says {read.digest}; it holds {', '.join(keys[:5])}{' ...' if len(keys) > 5 else ''}"
        )
