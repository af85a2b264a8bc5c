"""The load plan: which byte ranges a host reads, which rank reads them, and which ranks receive them.

Each host reads a byte from storage once. A range that only one rank needs is read directly
into its destination; a range that several ranks need is read by one of them and shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.limits import KIB
from holdfast.layout.box import Box
from holdfast.plan.byte_rows import rows_of
from holdfast.plan.files import Place, ShardPiece, TensorRun, runs_in

GAP_BYTES = 64 * KIB  # reading them takes less time than another range


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block as recorded in the manifest, without a digest if the source has none."""

    offset: int
    size: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A stored tensor file: its blocks, and its tensors in byte order."""

    name: str
    blocks: tuple[StoredBlock, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a stored tensor that `rank` needs."""

    place: Place
    box: Box
    rank: int


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a block that is read in one step: its offset in the file, its ranges and its pieces.

    Ranges and pieces are relative to the portion.
    """

    offset: int
    size: int
    ranges: tuple[tuple[int, int], ...]
    pieces: tuple[ShardPiece, ...]

    @property
    def read_bytes(self) -> int:
        """The bytes of its ranges."""
        return sum(size for _, size in self.ranges)

    def receivers(self) -> set[int]:
        return {piece.rank for piece in self.pieces}


@dataclass(frozen=True, slots=True)
class Read:
    """Portions that one rank reads in order. If `digest` is set they are a whole block to verify."""

    file: str
    offset: int
    size: int
    digest: str | None
    reader: int
    portions: tuple[Portion, ...]

    @property
    def bytes(self) -> int:
        return sum(portion.read_bytes for portion in self.portions)


def plan_load(
    files: Sequence[StoredFile], wants: Sequence[Want], *, verify: bool, portion_bytes: int
) -> tuple[Read, ...]:
    """Return the reads of one host for the wants of its ranks; verified blocks are read whole."""
    by_place: dict[Place, list[Want]] = {}
    for want in wants:
        if want.box.volume:
            by_place.setdefault(want.place, []).append(want)
    load: dict[int, int] = {}
    reads: list[Read] = []
    for file in files:
        places = [place for place in file.places if place in by_place]
        begins = [place.begin for place in places]
        for block in file.blocks:
            whole = verify and block.digest is not None
            begin, end = block.offset, block.offset + block.size
            if not whole and places:
                begin, end = max(begin, places[0].begin), min(end, places[-1].end)
            portions = [
                _portion(places, begins, by_place, offset, min(portion_bytes, end - offset), whole=whole)
                for offset in range(begin, end if places else begin, portion_bytes)
            ]
            reads += _reads(file.name, block, portions, load, whole=whole)
    return tuple(reads)


def _reads(
    file: str, block: StoredBlock, portions: Sequence[Portion], load: dict[int, int], *, whole: bool
) -> Iterator[Read]:
    """Yield one read for a verified block; otherwise assign each portion to a rank that needs it."""
    if not any(portion.pieces for portion in portions):
        return
    if whole:
        reader = _reader(portions, load)
        yield Read(file, block.offset, block.size, block.digest, reader, tuple(portions))
        load[reader] = load.get(reader, 0) + block.size
        return
    for portion in portions:
        if portion.pieces:
            read = Read(file, portion.offset, portion.size, None, _reader([portion], load), (portion,))
            load[read.reader] = load.get(read.reader, 0) + read.bytes
            yield read


def _reader(portions: Sequence[Portion], load: Mapping[int, int]) -> int:
    """Return the receiver with the least load, less the bytes it would otherwise receive from another reader."""
    taken: dict[int, int] = {}
    for portion in portions:
        for piece in portion.pieces:
            taken[piece.rank] = taken.get(piece.rank, 0) + piece.bytes
    return min(taken, key=lambda rank: (load.get(rank, 0) - taken[rank], rank))


def _portion(
    places: Sequence[Place],
    begins: Sequence[int],
    wants: Mapping[Place, list[Want]],
    offset: int,
    size: int,
    *,
    whole: bool,
) -> Portion:
    pieces: list[ShardPiece] = []
    ranges: list[tuple[int, int]] = []
    for run in runs_in(places, begins, offset, size):
        found = _take(run, wants[run.place])
        pieces += found
        if found and not whole:
            ranges += _needed(run, found)
    return Portion(offset, size, ((0, size),) if whole else tuple(_coalesce(ranges)), tuple(pieces))


def _take(run: TensorRun, wants: Sequence[Want]) -> list[ShardPiece]:
    pieces = []
    for want in wants:
        part = want.box.intersect(run.box)
        if part is not None:
            pieces.append(ShardPiece(run, part, want.rank, want.box))
    return pieces


def _needed(run: TensorRun, pieces: Sequence[ShardPiece]) -> Iterator[tuple[int, int]]:
    """Yield the needed bytes of a run as ranges relative to the portion; small gaps between rows are read too."""
    parts = {piece.part: piece for piece in pieces}
    if run.box in parts or _fills(run.box, set(parts)):
        yield run.at, run.bytes
        return
    for piece in parts.values():
        for rows in rows_of(piece):
            if rows.pitch - rows.width <= GAP_BYTES:
                yield rows.at, rows.end - rows.at
            else:
                yield from ((rows.at + row * rows.pitch, rows.width) for row in range(rows.count))


def _fills(box: Box, parts: set[Box]) -> bool:
    """Return True if disjoint parts cover the box, so that one range reads them all."""
    ordered = sorted(parts)
    if sum(part.volume for part in ordered) != box.volume:
        return False
    return all(a.intersect(b) is None for i, a in enumerate(ordered) for b in ordered[i + 1 :])


def _coalesce(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges in order, merging those that touch or overlap."""
    begin = end = -1
    for start, size in sorted(ranges):
        if start > end:
            if end > begin:
                yield begin, end - begin
            begin, end = start, start + size
        else:
            end = max(end, start + size)
    if end > begin:
        yield begin, end - begin
