"""Writing: gather the blocks this rank owns, digest them and put them in their place.

Bytes that another rank holds arrive through shared memory on the same host, and through a
file of the attempt from another host.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.ranks import Ranks, together
from holdfast.format.digest import digest_hex
from holdfast.persist.arena import Arena
from holdfast.plan.arrays import RawArray, Sources, aligned_buffer, part_of, piece_in_run, raw_dtype
from holdfast.plan.pieces import Piece
from holdfast.plan.save import BlockPlan, SavePlan
from holdfast.storage.base import Reader, Storage, Writer


@dataclass(frozen=True, slots=True)
class BlockReport:
    """What a rank tells of a block it wrote."""

    file: str
    offset: int
    size: int
    digest: str


def write_blocks(
    plan: SavePlan, ranks: Ranks, storage: Storage, attempt: str, sources: Sources
) -> list[BlockReport]:
    """Write every block of the plan; returns the reports of all ranks, on all ranks."""
    with ExitStack() as stack:
        nearby = _share_nearby(plan, ranks, sources, stack)
        faraway = _share_faraway(plan, ranks, storage, attempt, sources, stack)
        reports = together(ranks, lambda: _write_own(plan, ranks.rank, storage, attempt, sources, nearby, faraway))
    return [BlockReport(*report) for rank_reports in reports for report in rank_reports]


def _area_bytes(plan: SavePlan, rank: int, *, across_hosts: bool) -> int:
    end = 0
    for export in plan.exports(rank, across_hosts=across_hosts):
        end = export.offset + export.piece.bytes
    return end


def _copy_out(plan: SavePlan, rank: int, sources: Sources, area: RawArray, *, across_hosts: bool) -> None:
    for export in plan.exports(rank, across_hosts=across_hosts):
        piece = export.piece
        place = piece.run.place
        span = area[export.offset : export.offset + piece.bytes]
        shard = sources.array(place, piece.held)
        span.view(raw_dtype(place)).reshape(piece.part.sizes)[...] = part_of(shard, piece.part, piece.held)


def _share_nearby(plan: SavePlan, ranks: Ranks, sources: Sources, stack: ExitStack) -> dict[int, RawArray]:
    """Shared memory areas of the ranks on this host, filled with what other ranks' blocks need."""
    sizes = [_area_bytes(plan, rank, across_hosts=False) for rank in range(ranks.world)]
    if not any(sizes):
        return {}

    def fill() -> str | None:
        if not sizes[ranks.rank]:
            return None
        arena = Arena.create(sizes[ranks.rank])
        stack.callback(arena.unlink)
        _copy_out(plan, ranks.rank, sources, arena.bytes, across_hosts=False)
        return arena.name

    names = together(ranks, fill)
    givers = {piece.rank for block in plan.blocks if block.owner == ranks.rank for piece in block.pieces}
    here = plan.hosts[ranks.rank]

    def attach() -> dict[int, RawArray]:
        return {
            rank: Arena.attach(str(names[rank]), sizes[rank]).bytes
            for rank in sorted(givers)
            if rank != ranks.rank and plan.hosts[rank] == here and sizes[rank]
        }

    areas: dict[int, RawArray] = {}
    together(ranks, lambda: areas.update(attach()))
    return areas


def _share_faraway(
    plan: SavePlan, ranks: Ranks, storage: Storage, attempt: str, sources: Sources, stack: ExitStack
) -> dict[int, Reader]:
    """Files of the attempt in which ranks hand bytes to blocks on other hosts."""
    sizes = [_area_bytes(plan, rank, across_hosts=True) for rank in range(ranks.world)]
    if not any(sizes):
        return {}

    def fill() -> None:
        if sizes[ranks.rank]:
            area = aligned_buffer(sizes[ranks.rank])
            _copy_out(plan, ranks.rank, sources, area, across_hosts=True)
            storage.put(attempt, travel_file(ranks.rank), area.tobytes())

    together(ranks, fill)
    givers = {piece.rank for block in plan.blocks if block.owner == ranks.rank for piece in block.pieces}
    here = plan.hosts[ranks.rank]
    readers: dict[int, Reader] = {}

    def take() -> None:
        for rank in sorted(givers):
            if plan.hosts[rank] != here and sizes[rank]:
                readers[rank] = storage.take(attempt, travel_file(rank))
                stack.callback(readers[rank].close)

    together(ranks, take)
    return readers


def travel_file(rank: int) -> str:
    """The file of an attempt in which `rank` hands over bytes; gone before the attempt is published."""
    return f"travel-{rank}"


def drop_travel_files(plan: SavePlan, storage: Storage, attempt: str) -> None:
    for rank in range(len(plan.hosts)):
        if _area_bytes(plan, rank, across_hosts=True):
            storage.drop(attempt, travel_file(rank))


class _Gatherer:
    """Finds the bytes of a piece, wherever its rank left them."""

    def __init__(
        self,
        plan: SavePlan,
        rank: int,
        sources: Sources,
        nearby: Mapping[int, RawArray],
        faraway: Mapping[int, Reader],
    ) -> None:
        self._rank = rank
        self._sources = sources
        self._nearby = nearby
        self._faraway = faraway
        self._offsets: dict[int, int] = {}
        for giver in {*nearby, *faraway}:
            for export in plan.exports(giver, across_hosts=giver in faraway):
                self._offsets[id(export.piece)] = export.offset

    def piece(self, piece: Piece) -> RawArray:
        place = piece.run.place
        if piece.rank == self._rank:
            return part_of(self._sources.array(place, piece.held), piece.part, piece.held)
        offset = self._offsets[id(piece)]
        if piece.rank in self._nearby:
            span = self._nearby[piece.rank][offset : offset + piece.bytes]
        else:
            span = aligned_buffer(piece.bytes)
            self._faraway[piece.rank].read_into(offset, [memoryview(span)])
        return span.view(raw_dtype(place)).reshape(piece.part.sizes)

    def block(self, block: BlockPlan, buffer: RawArray) -> memoryview:
        """The whole block: live memory where one piece is all of it, else gathered in `buffer`."""
        if not block.header and len(block.pieces) == 1:
            data = self.piece(block.pieces[0])
            if data.flags.c_contiguous and data.nbytes == block.size:
                return memoryview(data.reshape(-1).view("u1"))
        buffer = buffer[: block.size]
        if block.header:
            buffer[: len(block.header)] = memoryview(block.header)
        for piece in block.pieces:
            piece_in_run(buffer, piece)[...] = self.piece(piece)
        return memoryview(buffer)


def _write_own(
    plan: SavePlan,
    rank: int,
    storage: Storage,
    attempt: str,
    sources: Sources,
    nearby: Mapping[int, RawArray],
    faraway: Mapping[int, Reader],
) -> list[list[Any]]:
    own = [block for block in plan.blocks if block.owner == rank]
    gatherer = _Gatherer(plan, rank, sources, nearby, faraway)
    buffer = aligned_buffer(max((block.size for block in own), default=0))
    writers: dict[str, Writer] = {}
    reports: list[list[Any]] = []
    try:
        for block in own:
            if block.file not in writers:
                writers[block.file] = storage.writer(attempt, block.file)
            data = gatherer.block(block, buffer)
            if data.nbytes != block.size:
                raise HoldfastError(f"{block.file} at {block.offset}: gathered {data.nbytes} of {block.size} bytes")
            reports.append([block.file, block.offset, block.size, digest_hex(data)])
            writers[block.file].write(block.offset, data)
        for writer in writers.values():
            writer.sync()
    finally:
        for writer in writers.values():
            writer.close()
    return reports
