"""Pieces: the parts of a block that one rank provides or receives.

A block is a range of bytes. Its overlap with a tensor is a few runs: boxes that are contiguous
in the file. A piece is the part of a run that one rank holds. Saves gather pieces into blocks
and loads scatter blocks into pieces, with the same value.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.layout.box import Box
from holdfast.layout.flat import flat_boxes
from holdfast.plan.files import Place


@dataclass(frozen=True, slots=True)
class TensorRun:
    """A box of a tensor that is contiguous in a block and starts at byte `at` of the block."""

    place: Place
    box: Box
    at: int

    @property
    def bytes(self) -> int:
        return self.box.volume * self.place.spec.dtype.bytes


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """The part of a run that `rank` holds in its shard with the box `held`."""

    run: TensorRun
    part: Box
    rank: int
    held: Box

    @property
    def bytes(self) -> int:
        return self.part.volume * self.run.place.spec.dtype.bytes


def runs_in(places: Sequence[Place], begins: Sequence[int], offset: int, size: int) -> Iterator[TensorRun]:
    """Yield the runs of the block [offset, offset + size), given a file's tensors in byte order."""
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
            yield TensorRun(place, box, at)
            at += box.volume * item
