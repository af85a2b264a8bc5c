"""The blocks of a blocking save: gathered from live memory and from other ranks, written on threads.

Bytes held by another rank are passed on: through shared memory between ranks of a host, in travel
files in the attempt's folder between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.gather import Fragment, Gatherer, write_travel_file
from holdfast.checkpoint.shared_memory import Arena, create_file, unlink_file
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.threads import cores
from holdfast.plan.files import (
    RawArray,
    ShardPiece,
    Sources,
    aligned_buffer,
    raw_dtype,
    row_major_strides,
)
from holdfast.plan.save_plan import BlockPlan, Export, SavePlan
from holdfast.plan.writer_job import travel_file
from holdfast.storage import linux
from holdfast.storage.open_files import LazyReaders

_THREADS = 8
_BUFFERS_BYTES = 256 << 20  # for blocks that are gathered, or copied from a device
_WINDOW_BYTES = 4 << 20  # of an export, mapped at a time


def write_blocks(plan: SavePlan, ranks: Ranks, attempt: Attempt, sources: Sources) -> list[BlockReport]:
    """Write every block of the plan; return the reports of all ranks, on all ranks."""
    with ExitStack() as stack:
        pieces = _exchange(plan, ranks, attempt, sources, stack)
        reports = run_on_all_ranks(ranks, lambda: _write_own(plan, ranks.rank, attempt, pieces))
    return [BlockReport.from_fields(report) for rank_reports in reports for report in rank_reports]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The pieces of this rank's blocks: its own memory, what ranks of its host share, travel files of other hosts."""

    rank: int
    sources: Sources
    offsets: dict[int, int] = field(default_factory=dict)  # by the id of the piece, in what its rank passes on
    shared: dict[int, RawArray] = field(default_factory=dict)  # by rank
    readers: LazyReaders[int] | None = None  # by rank

    def fetch(self, piece: ShardPiece) -> RawArray:
        """Return a piece in its shape: memory as it is, or read from a travel file."""
        if piece.rank == self.rank:
            return self.sources.array(piece)
        if piece.rank in self.shared:
            span = self._span(piece)
        else:
            assert self.readers is not None
            span = aligned_buffer(piece.bytes)
            self.readers[piece.rank].read_into(self.offsets[id(piece)], [span.data])
        return span.view(raw_dtype(piece.run.place)).reshape(piece.part.sizes)

    def release(self, block: BlockPlan) -> None:
        """Take what other ranks share of a written block out of this process: it would count as this rank's memory."""
        for rank in {piece.rank for piece in block.pieces} & self.shared.keys():
            spans = [self._span(piece) for piece in block.pieces if piece.rank == rank]  # one after another
            begin, end = spans[0].ctypes.data, spans[-1].ctypes.data + spans[-1].size
            linux.unmap_pages(begin, end - begin)

    def _span(self, piece: ShardPiece) -> RawArray:
        at = self.offsets[id(piece)]
        return self.shared[piece.rank][at : at + piece.bytes]


def _exchange(plan: SavePlan, ranks: Ranks, attempt: Attempt, sources: Sources, stack: ExitStack) -> _Pieces:
    """Export the pieces that other ranks need; return those of this rank's blocks."""
    if all(piece.rank == block.owner for block in plan.blocks for piece in block.pieces):
        return _Pieces(ranks.rank, sources)
    rank, host, storage = ranks.rank, plan.hosts[ranks.rank], attempt.storage

    def export() -> str | None:
        name = None
        for receiver, exports in plan.exports(rank).items():
            fragments = (_export_fragment(export, sources) for export in exports)
            if receiver == host:
                name = create_file(exports[-1].end)
                stack.callback(unlink_file, name)
                _fill(name, exports[-1].end, fragments)
            else:
                write_travel_file(storage, attempt.name, travel_file(rank, receiver), exports[-1].end, fragments)
        return name

    names = run_on_all_ranks(ranks, export)
    wanted = sorted({piece.rank for block in plan.blocks if block.owner == rank for piece in block.pieces} - {rank})
    exports = {source_rank: plan.exports(source_rank)[host] for source_rank in wanted}
    offsets = {id(export.piece): export.offset for own in exports.values() for export in own}
    shared = {
        source_rank: Arena(str(names[source_rank]), own[-1].end, writable=False).bytes
        for source_rank, own in exports.items()
        if plan.hosts[source_rank] == host
    }
    readers = LazyReaders(
        [source_rank for source_rank in wanted if source_rank not in shared],
        lambda source_rank: storage.take(attempt.name, travel_file(source_rank, host)),
    )
    stack.callback(readers.close)
    return _Pieces(rank, sources, offsets, shared, readers)


def _fill(name: str, size: int, fragments: Iterable[Fragment]) -> None:
    """Copy fragments into shared memory, which this process keeps mapped only as long as it writes there."""
    memory = Arena(name, size).bytes
    address, begin, end = memory.ctypes.data, 0, 0
    for fragment in fragments:
        if fragment.end > end:
            linux.unmap_pages(address + begin, end - begin)
            begin, end = end, min(size, max(fragment.end, end + _WINDOW_BYTES))
            linux.populate(address + begin, end - begin, write=True)
        fragment.put(fragment.array(), memory)
    linux.unmap_pages(address + begin, end - begin)


def _export_fragment(export: Export, sources: Sources) -> Fragment:
    """Return a piece that another rank needs, at its place in the file that passes it on."""
    piece, item = export.piece, export.piece.run.place.spec.dtype.bytes
    strides = row_major_strides(piece.part.sizes, item)
    return Fragment(export.offset, item, piece.part.sizes, strides, partial(sources.array, piece))


def drop_travel_files(plan: SavePlan, attempt: Attempt) -> None:
    """Delete the travel files between hosts: they are not part of the checkpoint."""
    pairs = {(piece.rank, plan.hosts[block.owner]) for block in plan.blocks for piece in block.pieces}
    for source_rank, host in sorted(pairs):
        if plan.hosts[source_rank] != host:
            attempt.storage.drop(attempt.name, travel_file(source_rank, host))


def _fragment(piece: ShardPiece, fetch: Callable[[ShardPiece], RawArray]) -> Fragment:
    """Return a piece at its place in its block."""
    item = piece.run.place.spec.dtype.bytes
    strides = row_major_strides(piece.run.box.sizes, item)
    return Fragment(piece.at, item, piece.part.sizes, strides, partial(fetch, piece))


def _write_own(plan: SavePlan, rank: int, attempt: Attempt, pieces: _Pieces) -> list[list[Any]]:
    own = [block for block in plan.blocks if block.owner == rank]
    largest = max((block.size for block in own), default=0)
    planned = {(block.file, block.offset): block for block in own if block.size}

    def make_gatherer() -> Callable[[BlockPlan], Iterator[memoryview]]:
        gatherer = Gatherer()
        return lambda block: gatherer.block(block, (_fragment(piece, pieces.fetch) for piece in block.pieces))

    def written(report: BlockReport) -> None:
        if report.size:
            pieces.release(planned[report.file, report.offset])

    neighbors = sum(host == plan.hosts[rank] for host in plan.hosts)
    threads = max(1, min(_THREADS, cores() // neighbors, _BUFFERS_BYTES // max(1, largest)))
    return [report.fields() for report in attempt.write(own, make_gatherer, threads, written)]
