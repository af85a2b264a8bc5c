"""Assembly of output blocks: copy boxes of source tensors into a buffer, tile by tile, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from holdfast.convert.source_files import SourceFiles
from holdfast.convert.spans import OutputBlock, byte_hull
from holdfast.core.limits import MIB
from holdfast.layout.box import Box
from holdfast.plan.files import ArrayDestination, Place, RawArray, ShardDestination, bytes_of, raw_dtype, run_array
from holdfast.plan.recipe import destinations_of

WINDOW_BYTES = 16 * MIB
_STRIP = 128

BoxCopy = tuple[tuple[Place, Box], ShardDestination]


def assemble_blocks(files: SourceFiles, blocks: Sequence[tuple[OutputBlock, RawArray]]) -> None:
    """Fill a buffer for each block with its bytes."""
    fill(files, itertools.chain.from_iterable(_copies(block, buffer) for block, buffer in blocks))


def _copies(block: OutputBlock, buffer: RawArray) -> Iterator[BoxCopy]:
    """Write the header, and yield the copies that fill the rest of the block."""
    buffer[: len(block.header)] = np.frombuffer(block.header, np.uint8)
    for run, recipe in block.runs():
        yield from destinations_of(recipe, run.box, ArrayDestination(run_array(buffer, run)))


def fill(files: SourceFiles, copies: Iterable[BoxCopy]) -> None:
    """Copy every box to its destination."""
    scattered: dict[Place, list[tuple[Box, ShardDestination]]] = {}
    for (place, part), destination in copies:
        target = _flat_target(place, part, destination)
        if target is not None:
            files.read_into(place.file, byte_hull(place, part)[0], [bytes_of(target)])
        else:
            scattered.setdefault(place, []).append((part, destination))
    for place, members in scattered.items():
        _fill_scattered(files, place, members)


def _flat_target(place: Place, part: Box, destination: ShardDestination) -> RawArray | None:
    """Return the memory of a destination if the part is contiguous in memory and in the file, else None."""
    direct = destination.direct()
    if direct is None or not direct.flags.c_contiguous or not part.is_contiguous_in(place.spec.shape):
        return None
    return direct


def _fill_scattered(files: SourceFiles, place: Place, members: Sequence[tuple[Box, ShardDestination]]) -> None:
    """Copy boxes of one source tensor, reading the tensor once, window by window."""
    item = place.spec.dtype.bytes
    for tile in tiles(_bounding_box([part for part, _ in members]), place, WINDOW_BYTES):
        overlaps = [(part.intersect(tile), part, destination) for part, destination in members]
        copies = [(overlap, part, destination) for overlap, part, destination in overlaps if overlap is not None]
        if not copies:
            continue
        begin, end = byte_hull(place, tile)
        dense = 2 * sum(overlap.volume for overlap, _, _ in copies) * item >= end - begin
        window = files.window(place.file, begin, end - begin, whole=dense)
        for overlap, part, destination in copies:
            for strip in _strips(overlap, destination):
                at = byte_hull(place, strip)[0] - begin
                view = np.ndarray(strip.sizes, raw_dtype(place), window.data, at, strides(place))
                destination.put(strip.relative_to(part), view)


def _strips(box: Box, destination: ShardDestination) -> Iterator[Box]:
    """Split a box along the destination's fastest dim, unless that is also the source's last dim.

    Transposing a few rows at a time stays within the pages that the TLB holds: three times as fast.
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


def _bounding_box(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that contains all boxes."""
    offsets = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    stops = tuple(map(max, zip(*(box.stops for box in boxes), strict=True)))
    return Box(offsets, tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True)))


def tiles(part: Box, place: Place, limit_bytes: int) -> Iterator[Box]:
    """Split a part of a tensor along its first dims into boxes that span at most `limit_bytes` of the file."""
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
    """Return the row-major strides of a stored tensor in bytes."""
    out: list[int] = []
    step = place.spec.dtype.bytes
    for size in reversed(place.spec.shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))
