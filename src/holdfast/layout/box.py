"""Boxes, n-dimensional slices of a tensor: overlap, contiguity, row-major offset; flat ranges as boxes.

A flat range of elements in row-major order is a few boxes. ZeRO-1 and flat-buffer optimizers hold
such ranges; so does every block of a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An n-d slice: the offset and size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def full(shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return Box((0,) * len(shape), shape)

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the overlap, or None if the boxes are disjoint."""
        offsets = []
        sizes = []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            begin = a if a > b else b
            end = a + n if a + n < b + m else b + m
            if end <= begin:
                return None
            offsets.append(begin)
            sizes.append(end - begin)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def relative_to(self, origin: Box) -> Box:
        """Return the same box relative to the offsets of `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin.offsets, strict=True)), self.sizes)

    def within(self, origin: Box) -> tuple[slice | EllipsisType, ...]:
        """Return the index of this box in an array that holds `origin`; it gives a view also for 0-d."""
        slices = (slice(a - b, a - b + n) for a, n, b in zip(self.offsets, self.sizes, origin.offsets, strict=True))
        return (*slices, ...)

    def is_contiguous_in(self, shape: tuple[int, ...]) -> bool:
        """Return True if the box is contiguous in a row-major array of `shape`."""
        seen_partial = False
        for size, whole in zip(reversed(self.sizes), reversed(shape), strict=True):
            if seen_partial and size != 1:
                return False
            seen_partial = seen_partial or size != whole
        return True

    def flat_offset(self, shape: tuple[int, ...]) -> int:
        """Return the index of the box's first element in a row-major array of `shape`."""
        position = 0
        for offset, whole in zip(self.offsets, shape, strict=True):
            position = position * whole + offset
        return position


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the elements [start, stop) as the fewest contiguous boxes, in order.

    A 2-d range has at most three boxes: the end of a row, whole rows, the start of a row.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"the range [{start}, {stop}) is not inside a tensor of {total} elements")
    if start == stop:
        return []
    if start == 0 and stop == total:
        return [Box.full(shape)]
    return list(_split(shape, (), start, stop))


def _split(shape: tuple[int, ...], above: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of [start, stop) inside the sub-array at the leading indices `above`."""
    dim = len(above)
    row = math.prod(shape[dim + 1 :])
    first, first_rest = divmod(start, row)
    last, last_rest = divmod(stop, row)
    ones = (1,) * dim
    if first == last:
        yield from _split(shape, (*above, first), first_rest, last_rest)
        return
    if first_rest:
        yield from _split(shape, (*above, first), first_rest, row)
        first += 1
    if first < last:
        inner = shape[dim + 1 :]
        yield Box((*above, first, *(0,) * len(inner)), (*ones, last - first, *inner))
    if last_rest:
        yield from _split(shape, (*above, last), 0, last_rest)
