"""The save plan: which rank writes which block, and where the block's bytes come from.

A block's owner and sources follow from the tensors in it alone, so that a rank can plan the
blocks it has to do with and no others, and still agree with everyone. Replicas are written
once, each block has one owner on a host that holds it, and owners take turns.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.limits import PAGE_BYTES
from holdfast.layout.box import Box
from holdfast.plan.check import Cell
from holdfast.plan.files import FilePlan, Place
from holdfast.plan.holding import Holding
from holdfast.plan.pieces import Piece, Run, runs_in

_EXPORT_ALIGNMENT = 64


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

    @property
    def end(self) -> int:
        return self.offset + self.piece.bytes


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The blocks of every file, or those that some ranks have to do with, and the hosts of the ranks."""

    files: tuple[FilePlan, ...]
    blocks: tuple[BlockPlan, ...]
    hosts: tuple[int, ...]

    def exports(self, rank: int) -> dict[int, list[Export]]:
        """What `rank` must give to the owners of blocks, by their host; each host has an area of its own."""
        areas: dict[int, list[Export]] = {}
        for block in self.blocks:
            if block.owner == rank:
                continue
            for piece in block.pieces:
                if piece.rank == rank:
                    area = areas.setdefault(self.hosts[block.owner], [])
                    end = area[-1].end if area else 0
                    area.append(Export(piece, -(-end // _EXPORT_ALIGNMENT) * _EXPORT_ALIGNMENT))
        return areas


@dataclass(frozen=True, slots=True)
class _Draft:
    """A block before it has an owner: its runs cut by cells, and the bytes each rank holds of it."""

    file: FilePlan
    offset: int
    size: int
    turn: int
    parts: tuple[tuple[Run, Box, Holding, Cell], ...]
    held: dict[int, int]


def plan_save(
    files: Sequence[FilePlan],
    holding_of: Callable[[Place], Holding],
    hosts: Sequence[int],
    block_bytes: int,
    *,
    only: Collection[int] | None = None,
    concerns: Callable[[Place], bool] = lambda place: True,
) -> SavePlan:
    """Cut files into blocks, give each an owner and name the source of every byte.

    With `only`, the plan has just the blocks that those ranks write or give bytes to, and
    `concerns` says which tensors they hold anything of.
    """
    blocks = []
    for number, file in enumerate(files):
        cutter = _Cutter(file, number, holding_of, hosts, block_bytes)
        for draft in cutter.drafts(concerns):
            block = _with_owner(draft, _owner(draft, hosts), hosts)
            if only is None or block.owner in only or any(piece.rank in only for piece in block.pieces):
                blocks.append(block)
    return SavePlan(tuple(files), tuple(blocks), tuple(hosts))


class _Cutter:
    """Cuts one file into blocks: at multiples of the block size, and where hosts meet."""

    def __init__(
        self,
        file: FilePlan,
        number: int,
        holding_of: Callable[[Place], Holding],
        hosts: Sequence[int],
        block_bytes: int,
    ) -> None:
        self._file = file
        self._number = number
        self._holding_of = holding_of
        self._hosts = hosts
        self._block_bytes = block_bytes
        self._begins = [place.begin for place in file.places]
        self._several_hosts = len(set(hosts)) > 1
        self._finders: dict[int, _CellFinder] = {}

    def drafts(self, concerns: Callable[[Place], bool]) -> Iterator[_Draft]:
        for cell in self._touched(concerns):
            begin, end = cell * self._block_bytes, min((cell + 1) * self._block_bytes, self._file.size)
            cuts = sorted({begin, *self._host_cuts(begin, end), end})
            for offset, stop in itertools.pairwise(cuts):
                yield self._draft(offset, stop - offset, self._number + cell)

    def _touched(self, concerns: Callable[[Place], bool]) -> list[int]:
        """The numbers of the block-sized cells that hold a header or bytes of a tensor of concern."""
        size = self._block_bytes
        cells = set(range(-(-len(self._file.header) // size)))
        for place in self._file.places:
            if place.end > place.begin and concerns(place):
                cells |= set(range(place.begin // size, (place.end - 1) // size + 1))
        return sorted(cells)

    def _finder(self, place: Place) -> _CellFinder:
        if place.begin not in self._finders:
            self._finders[place.begin] = _CellFinder(self._holding_of(place))
        return self._finders[place.begin]

    def _draft(self, offset: int, size: int, turn: int) -> _Draft:
        parts = []
        held: dict[int, int] = {}
        for run in runs_in(self._file.places, self._begins, offset, size):
            finder = self._finder(run.place)
            for cell, part in finder.overlapping(run.box):
                parts.append((run, part, finder.holding, cell))
                part_bytes = part.volume * run.place.spec.dtype.bytes
                for rank in {finder.holding.ranks[holder] for holder in cell.holders}:
                    held[rank] = held.get(rank, 0) + part_bytes
        return _Draft(self._file, offset, size, turn, tuple(parts), held)

    def _host_cuts(self, begin: int, end: int) -> Iterator[int]:
        """Page boundaries in [begin, end) where the bytes pass from one host to another."""
        if not self._several_hosts:
            return
        current: set[int] = set()
        for first, stop, holders in self._host_intervals(begin, end):
            if stop - first < PAGE_BYTES:
                continue  # shorter than a page: it travels, a cut would not help
            if current and not current & holders:
                yield max(begin, first // PAGE_BYTES * PAGE_BYTES)
                current = set(holders)
            else:
                current = current & holders if current else set(holders)

    def _host_intervals(self, begin: int, end: int) -> Iterator[tuple[int, int, set[int]]]:
        first = max(0, bisect.bisect_right(self._begins, begin) - 1)
        for place in self._file.places[first : bisect.bisect_left(self._begins, end)]:
            if place.end <= begin or place.end == place.begin:
                continue
            finder = self._finder(place)
            holding, item, shape = finder.holding, place.spec.dtype.bytes, place.spec.shape
            for flat, volume, cell in finder.in_byte_order(shape):
                low, high = place.begin + flat * item, place.begin + (flat + volume) * item
                if high > begin and low < end:
                    holders = {self._hosts[holding.ranks[h]] for h in cell.holders}
                    yield max(low, begin), min(high, end), holders
            if not finder.in_byte_order(shape) and holding.cells:
                everyone = {self._hosts[holding.ranks[h]] for cell in holding.cells for h in cell.holders}
                yield max(place.begin, begin), min(place.end, end), everyone


class _CellFinder:
    """Finds the cells that overlap a run without looking at all of them."""

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self._ordered: list[tuple[int, int, Cell]] | None = None
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

    def in_byte_order(self, shape: tuple[int, ...]) -> list[tuple[int, int, Cell]]:
        """Cells as runs of elements: first, count, cell. Empty if they are not contiguous."""
        if self._ordered is None:
            cells = self.holding.cells
            contiguous = all(cell.box.is_contiguous_in(shape) for cell in cells)
            runs = ((cell.box.flat_offset(shape), cell.box.volume, cell) for cell in cells)
            self._ordered = sorted(runs, key=lambda run: run[0]) if contiguous else []
        return self._ordered


def _owner(draft: _Draft, hosts: Sequence[int]) -> int:
    """The rank that writes a block: those that hold about as much as any take turns.

    A block goes to the host that holds most of it, so that only the rest has to travel.
    """
    if not draft.held:
        return draft.turn % len(hosts)  # a header alone: anyone may write it
    by_host: dict[int, int] = {}
    for run, part, holding, cell in draft.parts:
        size = part.volume * run.place.spec.dtype.bytes
        for host in {hosts[holding.ranks[holder]] for holder in cell.holders}:
            by_host[host] = by_host.get(host, 0) + size
    most = max(by_host.values())
    near = {rank: held for rank, held in draft.held.items() if by_host[hosts[rank]] == most}
    enough = max(near.values()) / 2
    candidates = sorted(rank for rank, held in near.items() if held >= enough)
    return candidates[draft.turn % len(candidates)]


def _with_owner(draft: _Draft, owner: int, hosts: Sequence[int]) -> BlockPlan:
    def nearness(rank: int) -> tuple[bool, bool, int]:
        return rank != owner, hosts[rank] != hosts[owner], rank

    pieces = []
    for run, part, holding, cell in draft.parts:
        holder = min(cell.holders, key=lambda h: nearness(holding.ranks[h]))
        pieces.append(Piece(run, part, holding.ranks[holder], holding.boxes[holder]))
    header = draft.file.header[draft.offset : draft.offset + draft.size]
    return BlockPlan(draft.file.name, draft.offset, draft.size, owner, header, tuple(pieces))
