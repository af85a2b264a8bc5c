"""Writer jobs: one rank's plan as byte copies between arena, blocks and travel files; the layout of the arena.

An arena holds the bytes that its rank provides, as spans of its shards. Copies out of the arenas
of the owner's host fill each block. Bytes from another host are first copied into a travel file.
A job is a value: it can be printed, compared, sent as JSON and replayed.
"""

from __future__ import annotations

import base64
import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.layout.box import Box
from holdfast.plan.files import Place, ShardPiece, row_major_strides
from holdfast.plan.save_plan import BlockPlan, Export, SavePlan

_ALIGNMENT = 512
SEAL_BYTES = 4096  # the first page of an arena describes its contents
_SMALL_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class ArenaSpan:
    """Elements [begin, end) of the shard `held`, in its row-major order, at byte `offset` of the arena."""

    place: Place
    held: Box
    begin: int
    end: int
    offset: int

    @property
    def bytes(self) -> int:
        return (self.end - self.begin) * self.place.spec.dtype.bytes

    @property
    def is_small(self) -> bool:
        """True if the overhead of a copy exceeds the cost of its bytes."""
        return self.bytes < _SMALL_BYTES


@dataclass(frozen=True, slots=True)
class Copy:
    """A strided copy of elements from `source` in the memory of `source_rank` to `target`; strides are in bytes."""

    source_rank: int
    source: int
    target: int
    item: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.item

    @property
    def flat(self) -> bool:
        """True if the copy is one contiguous range of bytes on both sides."""
        return not self.sizes or (len(self.sizes) == 1 and self.source_strides == self.target_strides == (self.item,))

    def fields(self) -> list[Any]:
        if self.flat:
            return [self.source_rank, self.source, self.target, self.bytes]
        strides = [list(self.sizes), list(self.source_strides), list(self.target_strides)]
        return [self.source_rank, self.source, self.target, self.item, *strides]

    @staticmethod
    def from_fields(fields: Sequence[Any]) -> Copy:
        if len(fields) == 4:
            source_rank, source, target, size = fields
            return Copy(source_rank, source, target, 1, (size,), (1,), (1,))
        source_rank, source, target, item, sizes, source_strides, target_strides = fields
        return Copy(source_rank, source, target, item, tuple(sizes), tuple(source_strides), tuple(target_strides))


@dataclass(frozen=True, slots=True)
class BlockJob:
    """One block to write: its header bytes, copies from arenas and copies from travel files."""

    file: str
    offset: int
    size: int
    header: bytes
    local: tuple[Copy, ...]
    remote: tuple[Copy, ...]

    def fields(self) -> list[Any]:
        header = base64.b64encode(self.header).decode()
        local, remote = ([copy.fields() for copy in copies] for copies in (self.local, self.remote))
        return [self.file, self.offset, self.size, header, local, remote]

    @staticmethod
    def from_fields(fields: Sequence[Any]) -> BlockJob:
        file, offset, size, header, local, remote = fields
        copies = (tuple(map(Copy.from_fields, kind)) for kind in (local, remote))
        return BlockJob(file, offset, size, base64.b64decode(header), *copies)


@dataclass(frozen=True, slots=True)
class TravelJob:
    """A file with the bytes that this rank passes to the writers of another host."""

    host: int
    size: int
    copies: tuple[Copy, ...]

    def fields(self) -> list[Any]:
        return [self.host, self.size, [copy.fields() for copy in self.copies]]

    @staticmethod
    def from_fields(fields: Sequence[Any]) -> TravelJob:
        host, size, copies = fields
        return TravelJob(host, size, tuple(map(Copy.from_fields, copies)))


@dataclass(frozen=True, slots=True)
class WriterJob:
    """The work of one rank's writer in every save of a plan.

    `host` is the number of the writer's host, out of `hosts`. `arena_bytes` has the sizes of the
    arenas of all ranks on that host.
    """

    plan: str
    rank: int
    world: int
    host: int
    hosts: int
    arena_bytes: Mapping[int, int]
    blocks: tuple[BlockJob, ...]
    travel: tuple[TravelJob, ...]

    @property
    def source_ranks(self) -> list[int]:
        """The ranks of other hosts whose travel files this writer waits for."""
        return sorted({copy.source_rank for block in self.blocks for copy in block.remote})

    @property
    def bytes(self) -> int:
        return sum(block.size for block in self.blocks)

    def fields(self) -> dict[str, Any]:
        return {
            "plan": self.plan,
            "rank": self.rank,
            "world": self.world,
            "host": self.host,
            "hosts": self.hosts,
            "arena_bytes": {str(rank): size for rank, size in self.arena_bytes.items()},
            "blocks": [block.fields() for block in self.blocks],
            "travel": [travel.fields() for travel in self.travel],
        }

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> WriterJob:
        return WriterJob(
            plan=fields["plan"],
            rank=fields["rank"],
            world=fields["world"],
            host=fields["host"],
            hosts=fields["hosts"],
            arena_bytes={int(rank): size for rank, size in fields["arena_bytes"].items()},
            blocks=tuple(map(BlockJob.from_fields, fields["blocks"])),
            travel=tuple(map(TravelJob.from_fields, fields["travel"])),
        )


class ArenaLayout:
    """The offsets in a rank's arena of the bytes that the rank provides.

    Small spans come first, single numbers before all others, adjacent to each other: one copy
    can move them from a device.
    """

    def __init__(self, plan: SavePlan, rank: int) -> None:
        needed: dict[tuple[Place, Box], list[tuple[int, int]]] = {}
        for block in plan.blocks:
            for piece in block.pieces:
                if piece.rank == rank:
                    needed.setdefault((piece.run.place, piece.held), []).append(_hull(piece))
        spans = [
            ArenaSpan(place, held, begin, end, 0)
            for (place, held), hulls in needed.items()
            for begin, end in _joined(hulls)
        ]
        spans.sort(key=lambda span: (not span.is_small, span.is_small and span.held.volume > 1))
        self.spans: list[ArenaSpan] = []
        self.size = SEAL_BYTES
        self._of: dict[tuple[Place, Box], tuple[list[int], list[ArenaSpan]]] = {}
        for span in spans:
            placed = replace(span, offset=self.size)
            self.size += -(-span.bytes // _ALIGNMENT) * _ALIGNMENT
            self.spans.append(placed)
            begins, found = self._of.setdefault((span.place, span.held), ([], []))
            at = bisect.bisect(begins, span.begin)
            begins.insert(at, span.begin)
            found.insert(at, placed)

    def locate(self, piece: ShardPiece) -> int:
        """Return the byte offset of a piece in the arena."""
        begins, spans = self._of[piece.run.place, piece.held]
        first = _flat(piece)
        span = spans[bisect.bisect_right(begins, first) - 1]
        return span.offset + (first - span.begin) * piece.run.place.spec.dtype.bytes


def _flat(piece: ShardPiece) -> int:
    """Return the index of a piece's first element in the shard that holds it."""
    return piece.part.relative_to(piece.held).flat_offset(piece.held.sizes)


def _hull(piece: ShardPiece) -> tuple[int, int]:
    """Return the smallest range of consecutive elements of the shard that contains the piece."""
    last = Box(tuple(stop - 1 for stop in piece.part.stops), (1,) * len(piece.part.sizes))
    return _flat(piece), last.relative_to(piece.held).flat_offset(piece.held.sizes) + 1


def _joined(hulls: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begin, end = 0, 0
    for low, high in sorted(hulls):
        if low > end:
            if end > begin:
                yield begin, end
            begin = low
        end = max(end, high)
    if end > begin:
        yield begin, end


_TRAVEL = "travel-"


def travel_file(rank: int, host: int) -> str:
    """Return the name of the file in which `rank` passes bytes to the writers of `host`."""
    return f"{_TRAVEL}{rank}-{host}"


def is_travel_file(name: str) -> bool:
    return name.startswith(_TRAVEL)


def writer_job(plan: SavePlan, digest: str, rank: int, arenas: Mapping[int, ArenaLayout]) -> WriterJob:
    """Build the job of `rank`'s writer; `arenas` has the layouts of the ranks on its host."""
    host = plan.hosts[rank]
    travel_offsets: dict[int, dict[int, int]] = {}
    blocks = []
    for block in plan.blocks:
        if block.owner == rank:
            for source_rank in {piece.rank for piece in block.pieces} - arenas.keys() - travel_offsets.keys():
                exports = plan.exports(source_rank)[host]
                travel_offsets[source_rank] = {id(export.piece): export.offset for export in exports}
            blocks.append(_block_job(block, arenas, travel_offsets))
    sizes = {member: arena.size for member, arena in arenas.items()}
    travel = tuple(
        TravelJob(other, exports[-1].end, tuple(_travel_copy(export, arenas[rank]) for export in exports))
        for other, exports in sorted(plan.exports(rank).items())
        if other != host
    )
    hosts = len(set(plan.hosts))
    return WriterJob(digest, rank, len(plan.hosts), host, hosts, sizes, tuple(blocks), travel)


def _travel_copy(export: Export, arena: ArenaLayout) -> Copy:
    piece, item = export.piece, export.piece.run.place.spec.dtype.bytes
    shard, contiguous = row_major_strides(piece.held.sizes, item), row_major_strides(piece.part.sizes, item)
    return _collapsed(piece.rank, arena.locate(piece), export.offset, item, piece.part.sizes, shard, contiguous)


def _block_job(
    block: BlockPlan, arenas: Mapping[int, ArenaLayout], travel_offsets: Mapping[int, Mapping[int, int]]
) -> BlockJob:
    local, remote = [], []
    for piece in block.pieces:
        item, sizes = piece.run.place.spec.dtype.bytes, piece.part.sizes
        target, in_block = piece.at, row_major_strides(piece.run.box.sizes, item)
        if piece.rank in arenas:
            source, strides = arenas[piece.rank].locate(piece), row_major_strides(piece.held.sizes, item)
            local.append(_collapsed(piece.rank, source, target, item, sizes, strides, in_block))
        else:
            source, strides = travel_offsets[piece.rank][id(piece)], row_major_strides(sizes, item)
            remote.append(_collapsed(piece.rank, source, target, item, sizes, strides, in_block))
    return BlockJob(block.file, block.offset, block.size, block.header, tuple(local), tuple(remote))


def _collapsed(
    source_rank: int,
    source: int,
    target: int,
    item: int,
    sizes: Sequence[int],
    source_strides: Sequence[int],
    target_strides: Sequence[int],
) -> Copy:
    """Return a copy with the fewest dims, merging dims that are contiguous on both sides."""
    dims: list[tuple[int, int, int]] = []
    for size, step, to in zip(sizes, source_strides, target_strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * step and dims[-1][2] == size * to:
            dims[-1] = (dims[-1][0] * size, step, to)
        else:
            dims.append((size, step, to))
    if not dims:
        dims = [(1, item, item)]
    whole, steps, tos = zip(*dims, strict=True)
    return Copy(source_rank, source, target, item, whole, steps, tos)
