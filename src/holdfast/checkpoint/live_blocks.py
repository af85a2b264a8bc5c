"""The blocks of a blocking save: gathered from live memory and from other ranks' travel files, written on threads.

Bytes held by another rank are passed in a file: in shared memory between ranks of a host, in the
attempt's folder between hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.gather import Fragment, Gatherer, write_fragments, write_travel_file
from holdfast.checkpoint.shared_memory import create_file, open_reader, open_writer, unlink_file
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
from holdfast.storage.base import Reader
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
            fragments = (_export_fragment(export, sources) for export in exports)
            if receiver == host:
                name = create_file(exports[-1].end)
                stack.callback(unlink_file, name)
                with closing(open_writer(name)) as writer:
                    write_fragments(writer, fragments)
            else:
                write_travel_file(storage, attempt.name, travel_file(rank, receiver), exports[-1].end, fragments)
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


def _fragment(piece: ShardPiece, array: Callable[[], RawArray]) -> Fragment:
    item = piece.run.place.spec.dtype.bytes
    strides = row_major_strides(piece.run.box.sizes, item)
    return Fragment(piece.at, item, piece.part.sizes, strides, array)


def _fetch(piece: ShardPiece, readers: Mapping[int, Reader], offset: int) -> RawArray:
    """Return a piece that another rank has exported."""
    span = aligned_buffer(piece.bytes)
    readers[piece.rank].read_into(offset, [span.data])
    return span.view(raw_dtype(piece.run.place)).reshape(piece.part.sizes)


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

    def fragments(block: BlockPlan) -> Iterator[Fragment]:
        for piece in block.pieces:
            if piece.rank == rank:
                yield _fragment(piece, partial(sources.array, piece))
            else:
                yield _fragment(piece, partial(_fetch, piece, readers, offsets[id(piece)]))

    def gatherer() -> Callable[[BlockPlan], Iterator[memoryview]]:
        own = Gatherer()
        return lambda block: own.block(block, fragments(block))

    neighbours = sum(host == plan.hosts[rank] for host in plan.hosts)
    threads = max(1, min(_THREADS, cores() // neighbours, _BUFFERS_BYTES // max(1, largest)))
    return [report.fields() for report in attempt.write(own, gatherer, threads)]
