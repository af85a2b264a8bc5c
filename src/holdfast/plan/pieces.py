"""Pieces: the parts of a block that one rank gives or takes.

A block is a range of bytes. Where it crosses a tensor it is a few runs: boxes that are
contiguous in the file. A piece is what one rank holds of one run. Saves gather pieces into
blocks, loads scatter blocks into pieces: the same value serves both.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.layout.box import Box
from holdfast.layout.flat import flat_boxes
from holdfast.plan.files import Place


@dataclass(frozen=True, slots=True)
class Run:
    """A box of a tensor that is one run of bytes in a block, beginning at byte `at` of the block."""

    place: Place
    box: Box
    at: int

    @property
    def bytes(self) -> int:
        return self.box.volume * self.place.spec.dtype.bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a run that `rank` has in its shard with the box `held`."""

    run: Run
    part: Box
    rank: int
    held: Box

    @property
    def bytes(self) -> int:
        return self.part.volume * self.run.place.spec.dtype.bytes


def runs_in(places: Sequence[Place], begins: Sequence[int], offset: int, size: int) -> Iterator[Run]:
    """The runs of the block [offset, offset + size), given a file's tensors in byte order."""
    end = offset + size
    for index in range(max(0, bisect.bisect_right(begins, offset) - 1), len(places)):
        place = places[index]
        if place.begin >= end:
            return
        begin, stop = max(offset, place.begin), min(end, place.end)
        if begin >= stop:
            continue
        item = place.spec.dtype.bytes
        at = begin - offset
        for box in flat_boxes(place.spec.shape, (begin - place.begin) // item, (stop - place.begin) // item):
            yield Run(place, box, at)
            at += box.volume * item
