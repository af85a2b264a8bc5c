"""The block plan of a save: files split into blocks, the rank that writes each, and the ranks that provide bytes.

A block's owner and sources depend only on the tensors in it. A rank can therefore plan just the
blocks that involve it, and still agree with all others. Replicas are written once. Each block
has one owner, on a host that holds it, and owners take turns.
"""

from __future__ import annotations

import bisect
import itertools
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.limits import PAGE_BYTES
from holdfast.layout.box import Box
from holdfast.plan.coverage import Cell, Holding
from holdfast.plan.files import FilePlan, Place, ShardPiece, TensorRun, runs_in

_EXPORT_ALIGNMENT = 64
_ABOUT = 0.9


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One block. Its owner writes it whole, from pieces and, at the start of the file, from `header`."""

    file: str
    offset: int
    size: int
    owner: int
    header: bytes
    pieces: tuple[ShardPiece, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """A piece for a block of another rank, and its offset in the export area of the rank that holds it."""

    piece: ShardPiece
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.piece.bytes


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The blocks of every file, or those that involve some ranks, and the host of each rank."""

    files: tuple[FilePlan, ...]
    blocks: tuple[BlockPlan, ...]
    hosts: tuple[int, ...]

    def exports(self, rank: int) -> dict[int, list[Export]]:
        """Return the pieces that `rank` provides to the owners of blocks, by host; each host has its own area."""
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
    """A block without an owner: its runs split by cells, and the bytes of it that each rank holds."""

    file: FilePlan
    offset: int
    size: int
    turn: int
    parts: tuple[tuple[TensorRun, Box, Holding, Cell], ...]
    held: dict[int, int]


def plan_save(
    files: Sequence[FilePlan],
    holding_of: Callable[[Place], Holding],
    hosts: Sequence[int],
    block_bytes: int,
    *,
    only: Collection[int] | None = None,
    is_relevant: Callable[[Place], bool] = lambda place: True,
    whole_files: bool = False,
) -> SavePlan:
    """Split files into blocks and assign each block an owner and the sources of its bytes.

    With `only`, the plan has just the blocks that those ranks write or provide bytes for;
    `is_relevant` selects the tensors that they hold part of. With `whole_files`, all blocks of
    a file have one owner, and are split only at multiples of the block size.
    """
    blocks = []
    cutter = _Cutter(holding_of, hosts, block_bytes, only)
    for file in files:
        writer = _file_owner(file, holding_of, hosts) if whole_files else None
        mine = writer is not None and (only is None or writer in only)
        for draft in cutter.drafts(file, (lambda place: True) if mine else is_relevant, cut_at_hosts=writer is None):
            block = _with_owner(draft, _owner(draft, hosts) if writer is None else writer, hosts)
            if only is None or block.owner in only or any(piece.rank in only for piece in block.pieces):
                blocks.append(block)
    return SavePlan(tuple(files), tuple(blocks), tuple(hosts))


@dataclass(frozen=True, slots=True)
class _Interval:
    """Bytes of a file and the hosts that hold them."""

    begin: int
    end: int
    hosts: frozenset[int]


class _Cutter:
    """Splits files into blocks at multiples of the block size and at host boundaries."""

    def __init__(
        self,
        holding_of: Callable[[Place], Holding],
        hosts: Sequence[int],
        block_bytes: int,
        only: Collection[int] | None,
    ) -> None:
        self._holding_of = holding_of
        self._hosts = hosts
        self._block_bytes = block_bytes
        self._several_hosts = len(set(hosts)) > 1
        self._here = None if only is None else frozenset(hosts[rank] for rank in only)
        self._finders: dict[int, _CellFinder] = {}

    def drafts(self, file: FilePlan, is_relevant: Callable[[Place], bool], *, cut_at_hosts: bool) -> Iterator[_Draft]:
        """Yield the blocks of a file; with `only`, skip those held entirely by other hosts."""
        several = self._several_hosts and cut_at_hosts
        begins = [place.begin for place in file.places]
        for cell in self._touched(file, is_relevant):
            begin, end = cell * self._block_bytes, min((cell + 1) * self._block_bytes, file.size)
            intervals = list(self._intervals(file, begins, begin, end)) if several else []
            cuts = sorted({begin, *_host_cuts(begin, intervals), end})
            for offset, stop in itertools.pairwise(cuts):
                if self._is_here(intervals, offset, stop):
                    yield self._draft(file, begins, offset, stop - offset, file.number + cell)

    def _touched(self, file: FilePlan, is_relevant: Callable[[Place], bool]) -> list[int]:
        """Return the numbers of the block-sized cells with bytes of a relevant tensor or only header bytes."""
        size, header = self._block_bytes, len(file.header)
        cells = set(range(header // size if file.size > header else -(-header // size)))
        for place in file.places:
            if place.end > place.begin and is_relevant(place):
                cells |= set(range(place.begin // size, (place.end - 1) // size + 1))
        return sorted(cells)

    def _is_here(self, intervals: Sequence[_Interval], offset: int, stop: int) -> bool:
        if self._here is None or not intervals:
            return True
        first = max(0, bisect.bisect_right(intervals, offset, key=lambda interval: interval.begin) - 1)
        for interval in itertools.islice(intervals, first, None):
            if interval.begin >= stop:
                return False
            if interval.end > offset and not self._here.isdisjoint(interval.hosts):
                return True
        return False

    def _finder(self, place: Place) -> _CellFinder:
        holding = self._holding_of(place)
        if id(holding) not in self._finders:
            self._finders[id(holding)] = _CellFinder(holding, self._hosts)
        return self._finders[id(holding)]

    def _draft(self, file: FilePlan, begins: Sequence[int], offset: int, size: int, turn: int) -> _Draft:
        parts = []
        held: dict[int, int] = {}
        for run in runs_in(file.places, begins, offset, size):
            finder = self._finder(run.place)
            for cell, part in finder.overlapping(run.box):
                parts.append((run, part, finder.holding, cell))
                part_bytes = part.volume * run.place.spec.dtype.bytes
                for rank in {finder.holding.ranks[holder] for holder in cell.holders}:
                    held[rank] = held.get(rank, 0) + part_bytes
        return _Draft(file, offset, size, turn, tuple(parts), held)

    def _intervals(self, file: FilePlan, begins: Sequence[int], begin: int, end: int) -> Iterator[_Interval]:
        """Yield the bytes [begin, end) of a file in order, by the hosts that hold them."""
        first = max(0, bisect.bisect_right(begins, begin) - 1)
        for place in file.places[first : bisect.bisect_left(begins, end)]:
            if place.end > begin and place.end > place.begin:
                item = place.spec.dtype.bytes
                low = max(0, (begin - place.begin) // item)
                high = -(-(min(end, place.end) - place.begin) // item)
                for at, stop, hosts in self._finder(place).by_host(place.spec.shape, low, high):
                    yield _Interval(max(begin, place.begin + at * item), min(end, place.begin + stop * item), hosts)


def _host_cuts(begin: int, intervals: Sequence[_Interval]) -> Iterator[int]:
    """Yield the page boundaries where the bytes pass from one host to another."""
    current: frozenset[int] = frozenset()
    for interval in intervals:
        if interval.end - interval.begin < PAGE_BYTES:
            continue  # shorter than a page: sent to the other host, a cut would not help
        if current and not current & interval.hosts:
            yield max(begin, interval.begin // PAGE_BYTES * PAGE_BYTES)
            current = interval.hosts
        else:
            current = current & interval.hosts or interval.hosts


class _CellFinder:
    """Finds the cells that overlap a run without visiting all of them."""

    def __init__(self, holding: Holding, hosts: Sequence[int]) -> None:
        self.holding = holding
        self._hosts = hosts
        self._runs: list[tuple[int, int, frozenset[int]]] | None = None
        self._starts: list[int] = []
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

    def by_host(self, shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Yield elements [low, high) as runs with their hosts; a single run if cells are not contiguous."""
        if self._runs is None:
            self._runs = list(self._by_host(shape))
            self._starts = [run[0] for run in self._runs]
        first = max(0, bisect.bisect_right(self._starts, low) - 1)
        yield from self._runs[first : bisect.bisect_left(self._starts, high)]

    def _by_host(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int, frozenset[int]]]:
        cells, ranks = self.holding.cells, self.holding.ranks
        by_cell = [frozenset(self._hosts[ranks[holder]] for holder in cell.holders) for cell in cells]
        if not all(cell.box.is_contiguous_in(shape) for cell in cells):
            yield 0, math.prod(shape), frozenset().union(*by_cell)
            return
        runs = [(cell.box.flat_offset(shape), cell.box.volume, own) for cell, own in zip(cells, by_cell, strict=True)]
        for begin, count, own in sorted(runs, key=lambda run: run[0]):
            yield begin, begin + count, own


def _owner(draft: _Draft, hosts: Sequence[int]) -> int:
    """Return the rank that writes a block: ranks that hold about the most of it take turns.

    A block goes to the host that holds most of it, so that only the rest crosses hosts.
    """
    if not draft.held:
        return draft.turn % len(hosts)  # only a header: any rank may write it
    by_host: dict[int, int] = {}
    for run, part, holding, cell in draft.parts:
        size = part.volume * run.place.spec.dtype.bytes
        for host in {hosts[holding.ranks[holder]] for holder in cell.holders}:
            by_host[host] = by_host.get(host, 0) + size
    most = max(by_host.values())
    near = {rank: held for rank, held in draft.held.items() if by_host[hosts[rank]] == most}
    enough = max(near.values()) / 2
    candidates = sorted(rank for rank, held in near.items() if held >= enough)
    return candidates[_in_turn(draft.turn, len(candidates))]


def _file_owner(file: FilePlan, holding_of: Callable[[Place], Holding], hosts: Sequence[int]) -> int:
    """Return the rank that writes a whole file: a rank that holds much of it, on a host that holds about the most.

    Files of all groups take turns, so that model, optimizer and averages do not all start with
    the same rank.
    """
    held: dict[int, int] = {}
    by_host: dict[int, int] = {}
    for place in file.places:
        holding = holding_of(place)
        for cell in holding.cells if place.spec.bytes else ():
            size = cell.box.volume * place.spec.dtype.bytes
            ranks = {holding.ranks[holder] for holder in cell.holders}
            for rank in ranks:
                held[rank] = held.get(rank, 0) + size
            for host in {hosts[rank] for rank in ranks}:
                by_host[host] = by_host.get(host, 0) + size
    turn = file.number + zlib.crc32(file.name.split("-")[0].encode())
    if not held:
        return file.number % len(hosts)
    most = max(by_host.values())
    near = {rank: size for rank, size in held.items() if by_host[hosts[rank]] >= most * _ABOUT}
    enough = max(near.values()) / 2
    candidates = sorted(rank for rank, size in near.items() if size >= enough)
    return candidates[turn % len(candidates)]


def _in_turn(turn: int, count: int) -> int:
    """Return the index of the candidate whose turn it is: the digit sum of `turn` in base `count`.

    The digit sum stays even when the same candidates recur with every second or fourth block,
    as they do when blocks and shards have power-of-two sizes.
    """
    total = 0
    while turn and count > 1:
        turn, digit = divmod(turn, count)
        total += digit
    return total % count


def _with_owner(draft: _Draft, owner: int, hosts: Sequence[int]) -> BlockPlan:
    def nearness(rank: int) -> tuple[bool, bool, int]:
        return rank != owner, hosts[rank] != hosts[owner], rank

    pieces = []
    for run, part, holding, cell in draft.parts:
        holder = min(cell.holders, key=lambda h: nearness(holding.ranks[h]))
        pieces.append(ShardPiece(run, part, holding.ranks[holder], holding.boxes[holder]))
    header = draft.file.header[draft.offset : draft.offset + draft.size]
    return BlockPlan(draft.file.name, draft.offset, draft.size, owner, header, tuple(pieces))
