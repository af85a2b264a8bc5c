"""Flat ranges: consecutive elements of a tensor in row-major order, as boxes.

ZeRO-1 and flat-buffer optimizers hold such ranges; so does every block of a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from holdfast.layout.box import Box


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
