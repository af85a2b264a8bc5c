"""Blocks of foreign files for load plans, which have none of their own: places ordered, without overlap, aligned."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from holdfast.core.errors import Unsupported
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.load_plan import StoredBlock, StoredFile

_ALIGN = 8  # no element is wider
_GAP_BYTES = 64 * 1024
_LAYERS = 256


def stored_files(groups: Iterable[Group], where: str) -> tuple[StoredFile, ...]:
    """Return the files of all places that the groups use.

    Tensors that share bytes go to several entries of one file. A block ends where the next place
    is not aligned to it: a load is split at multiples from a block's start, never inside an element.
    """
    by_file: dict[str, dict[Place, None]] = {}
    for group in groups:
        for recipe in group.tensors.values():
            for place in recipe.sources():
                if place.spec.bytes:
                    by_file.setdefault(place.file, {})[place] = None
    return tuple(
        StoredFile(name, blocks_of(layer), tuple(layer))
        for name, places in sorted(by_file.items())
        for layer in _layers(places, f"{where}/{name}")
    )


def _layers(places: Iterable[Place], where: str) -> list[list[Place]]:
    """Distribute places over as few lists as possible, so that the places of one list do not overlap."""
    layers: list[list[Place]] = []
    free: list[tuple[int, int]] = []  # the end and the number of each list
    for place in sorted(places, key=lambda place: (place.begin, -place.end, place.spec.key)):
        if free and free[0][0] <= place.begin:
            _, number = heapq.heappop(free)
        else:
            number = len(layers)
            layers.append([])
            if number >= _LAYERS:
                raise Unsupported(f"{where}: more than {_LAYERS} tensors share the bytes at {place.begin}")
        layers[number].append(place)
        heapq.heappush(free, (place.end, number))
    return layers


def blocks_of(places: Sequence[Place]) -> tuple[StoredBlock, ...]:
    """Return blocks for places that are sorted and do not overlap."""
    blocks: list[StoredBlock] = []
    begin = end = -1
    for place in places:
        if begin >= 0 and (place.begin - begin) % _ALIGN == 0 and place.begin - end < _GAP_BYTES:
            end = place.end
            continue
        if begin >= 0:
            blocks.append(StoredBlock(begin, end - begin, None))
        begin, end = place.begin, place.end
    if begin >= 0:
        blocks.append(StoredBlock(begin, end - begin, None))
    return tuple(blocks)
