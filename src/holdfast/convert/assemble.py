"""Assembling: boxes of sources brought to where they go in a target, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from holdfast.convert.source_files import SourceFiles
from holdfast.convert.spans import Block, byte_hull
from holdfast.core.limits import KIB, MIB
from holdfast.layout.box import Box
from holdfast.plan.arrays import ArrayDestination, RawArray, ShardDestination, bytes_of, raw_dtype, run_array
from holdfast.plan.files import Place
from holdfast.plan.recipe_fill import destinations_of

WINDOW_BYTES = 16 * MIB
_STRIP = 128
_LENT_BYTES = 512 * KIB  # a map costs more than a copy of less

Wanted = tuple[tuple[Place, Box], ShardDestination]


class Gathered:
    """The bytes of a block: a buffer, and views of mapped sources where those are the bytes already."""

    def __init__(self, block: Block, buffer: RawArray) -> None:
        self.block = block
        self.buffer = buffer
        self._views: list[tuple[int, memoryview]] = []

    def wanted(self) -> Iterator[Wanted]:
        """What fills the block; its header is put in at once."""
        header = self.block.header
        self.buffer[: len(header)] = np.frombuffer(header, np.uint8)
        for run, recipe in self.block.runs():
            yield from destinations_of(recipe, run.box, ArrayDestination(run_array(self.buffer, run)))

    def lend(self, target: RawArray, view: memoryview) -> None:
        """Let the view stand for the part `target` of the buffer."""
        self._views.append((target.ctypes.data - self.buffer.ctypes.data, view))

    def parts(self) -> list[memoryview]:
        """All of it in order; the views are let go."""
        views, self._views = sorted(self._views, key=lambda found: found[0]), []
        parts, position = [], 0
        for at, view in views:
            if at > position:
                parts.append(self.buffer[position:at].data)
            parts.append(view)
            position = at + view.nbytes
        if position < self.block.size:
            parts.append(self.buffer[position : self.block.size].data)
        return parts


def gather(files: SourceFiles, blocks: Sequence[Gathered]) -> None:
    """Bring together the bytes of blocks."""
    rest: list[Wanted] = []
    for gathered in blocks:
        for (place, part), destination in gathered.wanted():
            target = _flat_target(place, part, destination)
            if target is None:
                rest.append(((place, part), destination))
            elif target.nbytes >= _LENT_BYTES and files.reader(place.file).mappable:
                view = files.reader(place.file).map(byte_hull(place, part)[0], target.nbytes, whole=True)
                gathered.lend(target, view)
            else:
                files.read_into(place.file, byte_hull(place, part)[0], [bytes_of(target)])
    fill(files, rest)


def fill(files: SourceFiles, wanted: Iterable[Wanted]) -> None:
    """Bring every wanted box to its destination."""
    turned: dict[Place, list[tuple[Box, ShardDestination]]] = {}
    for (place, part), destination in wanted:
        target = _flat_target(place, part, destination)
        if target is not None:
            files.read_into(place.file, byte_hull(place, part)[0], [bytes_of(target)])
        else:
            turned.setdefault(place, []).append((part, destination))
    for place, members in turned.items():
        _fill_turned(files, place, members)


def _flat_target(place: Place, part: Box, destination: ShardDestination) -> RawArray | None:
    """The memory that takes a part, if it is one run of bytes both there and in the file."""
    direct = destination.direct()
    if direct is None or not direct.flags.c_contiguous or not part.is_contiguous_in(place.spec.shape):
        return None
    return direct


def _fill_turned(files: SourceFiles, place: Place, members: Sequence[tuple[Box, ShardDestination]]) -> None:
    """Go through a source once, window by window, for all who want boxes of it."""
    item = place.spec.dtype.bytes
    for tile in tiles(_around([part for part, _ in members]), place, WINDOW_BYTES):
        cuts = [(part.intersect(tile), part, destination) for part, destination in members]
        found = [(cut, part, destination) for cut, part, destination in cuts if cut is not None]
        if not found:
            continue
        begin, end = byte_hull(place, tile)
        dense = 2 * sum(cut.volume for cut, _, _ in found) * item >= end - begin
        window = files.window(place.file, begin, end - begin, whole=dense)
        for cut, part, destination in found:
            for strip in _strips(cut, destination):
                at = byte_hull(place, strip)[0] - begin
                view = np.ndarray(strip.sizes, raw_dtype(place), window.data, at, strides(place))
                destination.put(strip.relative_to(part), view)


def _strips(box: Box, destination: ShardDestination) -> Iterator[Box]:
    """A box cut along the dim that lies closest in the destination, where that is not the source's last.

    Turning a few rows at a time keeps to the pages that a core can remember: three times as fast.
    """
    direct = destination.direct()
    wide = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if direct is None or len(wide) < 2:
        dim = wide[-2] if len(wide) > 1 else None
    else:
        dim = min(wide, key=lambda dim: direct.strides[dim])
    if dim is None or dim == wide[-1]:
        yield box
        return
    for at in range(0, box.sizes[dim], _STRIP):
        offsets = tuple(o + at if d == dim else o for d, o in enumerate(box.offsets))
        yield Box(offsets, tuple(min(_STRIP, n - at) if d == dim else n for d, n in enumerate(box.sizes)))


def _around(boxes: Sequence[Box]) -> Box:
    """The smallest box that holds all of the boxes."""
    offsets = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stops = tuple(map(max, zip(*(box.stops for box in boxes), strict=True)))
    return Box(offsets, tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True)))


def tiles(part: Box, place: Place, limit_bytes: int) -> Iterator[Box]:
    """A part of a tensor cut, along its first dims, into boxes that reach over at most `limit_bytes` of the file."""
    begin, end = byte_hull(place, part)
    dim = next((dim for dim, size in enumerate(part.sizes) if size > 1), None)
    if end - begin <= limit_bytes or dim is None:
        yield part
        return
    step = max(1, limit_bytes // strides(place)[dim])
    for at in range(0, part.sizes[dim], step):
        offsets = tuple(o + at if d == dim else o for d, o in enumerate(part.offsets))
        sizes = tuple(min(step, size - at) if d == dim else size for d, size in enumerate(part.sizes))
        tile = Box(offsets, sizes)
        yield from tiles(tile, place, limit_bytes) if step == 1 else [tile]


def strides(place: Place) -> tuple[int, ...]:
    """The row-major strides of a stored tensor, in bytes."""
    out: list[int] = []
    step = place.spec.dtype.bytes
    for size in reversed(place.spec.shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))
