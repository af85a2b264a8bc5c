"""Pieces as rows of bytes: where the rows are in a block and in the shard, and which of them a byte range contains."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.plan.files import ShardPiece


@dataclass(frozen=True, slots=True)
class ByteRows:
    """Rows of `width` bytes, `pitch` bytes apart in a block or portion, and `shard_pitch` apart in the shard.

    `at` and `shard_at` are the offsets of the first row. A single row has any pitch but 0.
    """

    at: int
    pitch: int
    shard_at: int
    shard_pitch: int
    width: int
    count: int

    @property
    def end(self) -> int:
        """The end of the last row in the block."""
        return self.at + (self.count - 1) * self.pitch + self.width

    @property
    def bytes(self) -> int:
        return self.width * self.count

    def within(self, begin: int, end: int) -> Iterator[ByteRows]:
        """Yield what the byte range [begin, end) of the block contains: whole rows, and parts of rows at its ends."""
        if begin <= self.at and self.end <= end:
            yield self
            return
        first = max(0, (begin - self.at - self.width) // self.pitch + 1)
        stop = min(self.count, (end - self.at + self.pitch - 1) // self.pitch)
        if first < stop and self.at + first * self.pitch < begin:
            yield self._part_of_row(first, begin, end)
            first += 1
        cut = first < stop and self.at + (stop - 1) * self.pitch + self.width > end
        if first < stop - cut:
            yield self._rows(first, stop - cut)
        if cut:
            yield self._part_of_row(stop - 1, begin, end)

    def batches(self, limit_bytes: int) -> Iterator[ByteRows]:
        """Yield all rows, a few at a time or a part of one, each time at most `limit_bytes`."""
        if self.width > limit_bytes:
            for row in range(self.count):
                at = self.at + row * self.pitch
                for begin in range(at, at + self.width, limit_bytes):
                    yield self._part_of_row(row, begin, begin + limit_bytes)
            return
        step = limit_bytes // self.width
        for first in range(0, self.count, step):
            yield self._rows(first, min(first + step, self.count))

    def _rows(self, first: int, stop: int) -> ByteRows:
        at, shard_at = self.at + first * self.pitch, self.shard_at + first * self.shard_pitch
        return ByteRows(at, self.pitch, shard_at, self.shard_pitch, self.width, stop - first)

    def _part_of_row(self, row: int, begin: int, end: int) -> ByteRows:
        at = self.at + row * self.pitch
        begin, end = max(begin, at), min(end, at + self.width)
        shard_at = self.shard_at + row * self.shard_pitch + begin - at
        return ByteRows(begin, self.pitch, shard_at, self.shard_pitch, end - begin, 1)


def rows_of(piece: ShardPiece) -> Iterator[ByteRows]:
    """Yield the rows of a piece: mostly all at once; more often for a part of several inner dims."""
    item = piece.run.place.spec.dtype.bytes
    inside, held = piece.part.relative_to(piece.run.box), piece.part.relative_to(piece.held)
    at = piece.run.at + inside.flat_offset(piece.run.box.sizes) * item
    shard_at = held.flat_offset(piece.held.sizes) * item
    width = stride = shard_stride = item
    outer: list[tuple[int, int, int]] = []  # size, stride in the block, stride in the shard; from the inside out
    for size, whole, shard_whole in zip(
        reversed(piece.part.sizes), reversed(piece.run.box.sizes), reversed(piece.held.sizes), strict=True
    ):
        if size > 1:
            if not outer and stride == width == shard_stride:
                width *= size
            elif outer and (stride, shard_stride) == (outer[-1][0] * outer[-1][1], outer[-1][0] * outer[-1][2]):
                outer[-1] = (outer[-1][0] * size, outer[-1][1], outer[-1][2])
            else:
                outer.append((size, stride, shard_stride))
        stride *= whole
        shard_stride *= shard_whole
    count, pitch, shard_pitch = outer[0] if outer else (1, width, width)
    for index in itertools.product(*(range(size) for size, _, _ in outer[1:])):
        skip = sum(number * level[1] for number, level in zip(index, outer[1:], strict=True))
        shard_skip = sum(number * level[2] for number, level in zip(index, outer[1:], strict=True))
        yield ByteRows(at + skip, pitch, shard_at + shard_skip, shard_pitch, width, count)
