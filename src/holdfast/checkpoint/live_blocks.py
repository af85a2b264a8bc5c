"""The blocks of a blocking save: gathered from live memory and from other ranks' travel files, written on threads.

Bytes held by another rank are passed in a file: in shared memory between ranks of a host, in the
attempt's folder between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.shared_memory import create_file, open_reader, open_writer, unlink_file
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.threads import cores
from holdfast.plan.files import (
    RawArray,
    ShardPiece,
    Sources,
    TensorRun,
    aligned_buffer,
    bytes_of,
    piece_in_run,
    raw_dtype,
)
from holdfast.plan.save_plan import BlockPlan, Export, SavePlan
from holdfast.plan.writer_job import travel_file
from holdfast.storage.base import Reader, Writer
from holdfast.storage.open_files import LazyReaders

_THREADS = 8
_BUFFERS_BYTES = 256 << 20  # for blocks that are gathered, or copied from a device


def write_blocks(plan: SavePlan, ranks: Ranks, attempt: Attempt, sources: Sources) -> list[BlockReport]:
    """Write every block of the plan; return the reports of all ranks, on all ranks."""
    with ExitStack() as stack:
        readers = _exchange(plan, ranks, attempt, sources, stack)
        reports = run_on_all_ranks(ranks, lambda: _write_own(plan, ranks.rank, attempt, sources, readers))
    return [BlockReport.from_fields(report) for rank_reports in reports for report in rank_reports]


def _exchange(
    plan: SavePlan, ranks: Ranks, attempt: Attempt, sources: Sources, stack: ExitStack
) -> Mapping[int, Reader]:
    """Write the pieces that other ranks need to files; return readers of the pieces for this rank, by rank."""
    if all(piece.rank == block.owner for block in plan.blocks for piece in block.pieces):
        return {}
    rank, host, storage = ranks.rank, plan.hosts[ranks.rank], attempt.storage

    def export() -> str | None:
        name = None
        for receiver, exports in plan.exports(rank).items():
            if receiver == host:
                name = create_file(exports[-1].end)
                stack.callback(unlink_file, name)
                _copy_out(exports, sources, open_writer(name), whole=False)
            else:
                file = travel_file(rank, receiver)
                storage.create(attempt.name, file, exports[-1].end)
                _copy_out(exports, sources, storage.writer(attempt.name, file), whole=storage.whole_files)
        return name

    names = run_on_all_ranks(ranks, export)

    def open_export(source_rank: int) -> Reader:
        if plan.hosts[source_rank] == host:
            return open_reader(str(names[source_rank]))
        return storage.take(attempt.name, travel_file(source_rank, host))

    wanted = {piece.rank for block in plan.blocks if block.owner == rank for piece in block.pieces} - {rank}
    readers = LazyReaders(sorted(wanted), open_export)
    stack.callback(readers.close)
    return readers


def _copy_out(exports: Sequence[Export], sources: Sources, writer: Writer, *, whole: bool) -> None:
    """Write the exports to a file; with `whole`, the file is written without holes and completed."""
    position = 0
    try:
        for export in exports:
            if whole and export.offset > position:
                writer.write(position, [memoryview(bytes(export.offset - position))])
            position = export.end
            writer.write(export.offset, [bytes_of(np.ascontiguousarray(sources.array(export.piece)))])
        if whole:
            writer.sync()
    finally:
        writer.close()


def drop_travel_files(plan: SavePlan, attempt: Attempt) -> None:
    """Delete the travel files between hosts: they are not part of the checkpoint."""
    pairs = {(piece.rank, plan.hosts[block.owner]) for block in plan.blocks for piece in block.pieces}
    for source_rank, host in sorted(pairs):
        if plan.hosts[source_rank] != host:
            attempt.storage.drop(attempt.name, travel_file(source_rank, host))


class _LiveGatherer:
    """Assembles blocks from live memory and from the exports of other ranks."""

    def __init__(
        self, rank: int, sources: Sources, readers: Mapping[int, Reader], offsets: Mapping[int, int], size: int
    ) -> None:
        self._rank = rank
        self._sources = sources
        self._readers = readers
        self._offsets = offsets  # of exported pieces, by identity
        self._buffer = aligned_buffer(size)

    def block(self, block: BlockPlan) -> Iterator[memoryview]:
        """Yield the bytes of a block in order: live memory where contiguous, else gathered."""
        if block.header:
            yield memoryview(block.header)
        for run, pieces in _by_run(block.pieces):
            whole = len(pieces) == 1 and pieces[0].part == run.box
            if whole and pieces[0].rank == self._rank:
                own = self._sources.array(pieces[0])
                if own.flags.c_contiguous:
                    yield bytes_of(own)
                    continue
            target = self._buffer[run.at : run.at + run.bytes]
            if whole and pieces[0].rank != self._rank:
                self._fetch(pieces[0], target)
            else:
                for piece in pieces:
                    piece_in_run(self._buffer, piece)[...] = self._data(piece)
            yield target.data

    def _fetch(self, piece: ShardPiece, target: RawArray) -> None:
        self._readers[piece.rank].read_into(self._offsets[id(piece)], [target.data])

    def _data(self, piece: ShardPiece) -> RawArray:
        if piece.rank == self._rank:
            return self._sources.array(piece)
        span = aligned_buffer(piece.bytes)
        self._fetch(piece, span)
        return span.view(raw_dtype(piece.run.place)).reshape(piece.part.sizes)


def _by_run(pieces: Sequence[ShardPiece]) -> Iterator[tuple[TensorRun, list[ShardPiece]]]:
    """Group pieces by run, in byte order."""
    runs: dict[int, tuple[TensorRun, list[ShardPiece]]] = {}
    for piece in pieces:
        runs.setdefault(piece.run.at, (piece.run, []))[1].append(piece)
    for at in sorted(runs):
        yield runs[at]


def _write_own(
    plan: SavePlan, rank: int, attempt: Attempt, sources: Sources, readers: Mapping[int, Reader]
) -> list[list[Any]]:
    own = [block for block in plan.blocks if block.owner == rank]
    largest = max((block.size for block in own), default=0)
    offsets = {
        id(export.piece): export.offset
        for source_rank in readers
        for export in plan.exports(source_rank)[plan.hosts[rank]]
    }

    def gatherer() -> Callable[[BlockPlan], Iterable[memoryview]]:
        return _LiveGatherer(rank, sources, readers, offsets, largest).block

    neighbours = sum(host == plan.hosts[rank] for host in plan.hosts)
    threads = max(1, min(_THREADS, cores() // neighbours, _BUFFERS_BYTES // max(1, largest)))
    return [report.fields() for report in attempt.write(own, gatherer, threads)]
