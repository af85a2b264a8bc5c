"""The save plan: which rank writes which block, and where the block's bytes come from.

Every rank computes the same plan from the same layout. Replicas are written once, each
block has one owner on a host that holds it, and the bytes are balanced over the ranks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.limits import PAGE_BYTES
from holdfast.layout.box import Box
from holdfast.plan.check import Cell
from holdfast.plan.files import FilePlan, Place
from holdfast.plan.pieces import Piece, Run, runs_in


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds a tensor: its cells, and the rank and box of each holder they name."""

    cells: tuple[Cell, ...]
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]

    def first(self) -> Holding:
        """The same tensor, held by the first replica alone, so that all of it comes from there."""
        cells = (Cell(cell.box, (min(cell.holders, key=lambda h: self.ranks[h]),)) for cell in self.cells)
        return Holding(tuple(cells), self.ranks, self.boxes)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One block: its owner writes it whole, from `header` (if it begins the file) and pieces."""

    file: str
    offset: int
    size: int
    owner: int
    header: bytes
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """A piece that must reach another rank's block, and where it lies in the giver's export area."""

    piece: Piece
    offset: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Every block of every file, and the hosts of the ranks."""

    files: tuple[FilePlan, ...]
    blocks: tuple[BlockPlan, ...]
    hosts: tuple[int, ...]

    def exports(self, rank: int, *, across_hosts: bool) -> Iterator[Export]:
        """What `rank` must give to the owners of blocks on its own host, or on others."""
        position = 0
        for block in self.blocks:
            if block.owner == rank or (self.hosts[block.owner] != self.hosts[rank]) != across_hosts:
                continue
            for piece in block.pieces:
                if piece.rank == rank:
                    yield Export(piece, position)
                    position += -(-piece.bytes // 64) * 64


@dataclass(frozen=True, slots=True)
class _Draft:
    """A block before it has an owner: its runs cut by cells, and the bytes each rank holds of it."""

    file: FilePlan
    offset: int
    size: int
    parts: tuple[tuple[Run, Box, Holding, Cell], ...]
    held: Mapping[int, int]


def plan_save(
    files: Sequence[FilePlan],
    holdings: Mapping[Place, Holding],
    hosts: Sequence[int],
    block_bytes: int,
) -> SavePlan:
    """Cut files into blocks, give each an owner and name the source of every byte."""
    drafts = [draft for file in files for draft in _drafts(file, holdings, hosts, block_bytes)]
    owners = _owners(drafts, hosts)
    blocks = tuple(_with_owner(draft, owner, hosts) for draft, owner in zip(drafts, owners, strict=True))
    return SavePlan(tuple(files), blocks, tuple(hosts))


def _drafts(
    file: FilePlan, holdings: Mapping[Place, Holding], hosts: Sequence[int], block_bytes: int
) -> Iterator[_Draft]:
    cuts = sorted({*range(0, file.size, block_bytes), *_host_cuts(file, holdings, hosts), file.size})
    begins = [place.begin for place in file.places]
    finders = {place: _CellFinder(holdings[place]) for place in file.places}
    for offset, end in itertools.pairwise(cuts):
        parts = []
        held: dict[int, int] = {}
        for run in runs_in(file.places, begins, offset, end - offset):
            finder = finders[run.place]
            for cell, part in finder.overlapping(run.box):
                parts.append((run, part, finder.holding, cell))
                size = part.volume * run.place.spec.dtype.bytes
                for rank in {finder.holding.ranks[holder] for holder in cell.holders}:
                    held[rank] = held.get(rank, 0) + size
        yield _Draft(file, offset, end - offset, tuple(parts), held)


class _CellFinder:
    """Finds the cells that overlap a run without looking at all of them."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self._flat = bool(holding.cells) and not holding.cells[0].box.sizes
        if not self._flat:
            self._begins = [cell.box.offsets[0] for cell in holding.cells]
            self._widest = max((cell.box.sizes[0] for cell in holding.cells), default=0)

    def overlapping(self, box: Box) -> Iterator[tuple[Cell, Box]]:
        cells: Sequence[Cell] = self.holding.cells
        if not self._flat:
            first = bisect.bisect_left(self._begins, box.offsets[0] - self._widest + 1)
            cells = cells[first : bisect.bisect_left(self._begins, box.stops[0])]
        for cell in cells:
            part = cell.box.intersect(box)
            if part is not None:
                yield cell, part


def _host_cuts(file: FilePlan, holdings: Mapping[Place, Holding], hosts: Sequence[int]) -> Iterator[int]:
    """Page boundaries where a file's bytes pass from one host to another."""
    if len(set(hosts)) < 2:
        return
    current: set[int] = set()
    for place in file.places:
        for begin, end, holders in _host_intervals(place, holdings[place], hosts):
            if end - begin < PAGE_BYTES:
                continue  # shorter than a page: it travels, a cut would not help
            if current and not current & holders:
                yield begin // PAGE_BYTES * PAGE_BYTES
                current = set(holders)
            else:
                current = current & holders if current else set(holders)


def _host_intervals(place: Place, holding: Holding, hosts: Sequence[int]) -> Iterator[tuple[int, int, set[int]]]:
    item = place.spec.dtype.bytes
    shape = place.spec.shape
    if all(cell.box.is_contiguous_in(shape) for cell in holding.cells):
        for cell in sorted(holding.cells, key=lambda cell: cell.box.flat_offset(shape)):
            begin = place.begin + cell.box.flat_offset(shape) * item
            yield begin, begin + cell.box.volume * item, {hosts[holding.ranks[h]] for h in cell.holders}
    else:
        yield place.begin, place.end, {hosts[holding.ranks[h]] for cell in holding.cells for h in cell.holders}


def _owners(drafts: Sequence[_Draft], hosts: Sequence[int]) -> list[int]:
    """One owner for each block: least loaded among those who hold most, the bound ones first."""
    candidates = [_candidates(draft, hosts) for draft in drafts]
    owners = [0] * len(drafts)
    load = [0] * len(hosts)
    for index in sorted(range(len(drafts)), key=lambda i: len(candidates[i])):
        draft = drafts[index]

        def cost(rank: int, draft: _Draft = draft) -> tuple[int, int]:
            return load[rank] + draft.size - draft.held.get(rank, 0), rank

        owner = min(candidates[index], key=cost)
        owners[index] = owner
        load[owner] += draft.size
    return owners


def _candidates(draft: _Draft, hosts: Sequence[int]) -> list[int]:
    if not draft.held:
        return list(range(len(hosts)))  # a header alone: anyone may write it
    by_host: dict[int, int] = {}
    for run, part, holding, cell in draft.parts:
        size = part.volume * run.place.spec.dtype.bytes
        for host in {hosts[holding.ranks[holder]] for holder in cell.holders}:
            by_host[host] = by_host.get(host, 0) + size
    most = max(by_host.values())
    return [rank for rank in draft.held if by_host[hosts[rank]] == most]


def _with_owner(draft: _Draft, owner: int, hosts: Sequence[int]) -> BlockPlan:
    def nearness(rank: int) -> tuple[bool, bool, int]:
        return rank != owner, hosts[rank] != hosts[owner], rank

    pieces = []
    for run, part, holding, cell in draft.parts:
        holder = min(cell.holders, key=lambda h: nearness(holding.ranks[h]))
        pieces.append(Piece(run, part, holding.ranks[holder], holding.boxes[holder]))
    header = draft.file.header[draft.offset : draft.offset + draft.size]
    return BlockPlan(draft.file.name, draft.offset, draft.size, owner, header, tuple(pieces))
