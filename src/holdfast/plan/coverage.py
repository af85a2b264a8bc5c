"""Coverage of a tensor by the ranks' boxes: holes raise; cells with their holders; a cache of holdings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.errors import LayoutError
from holdfast.layout.box import Box
from holdfast.layout.placement import Spread

_GRID_CELLS = 1_000_000


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of a tensor whose elements all have the same holders: indices of the boxes that contain it."""

    box: Box
    holders: tuple[int, ...]


def cells_of(shape: tuple[int, ...], boxes: Sequence[Box], what: str) -> list[Cell]:
    """Split a tensor into cells, each with every box that contains it.

    Equal or disjoint boxes, which meshes and flat ranges produce, are cells themselves.
    Overlapping boxes are split along each other's borders. Raises LayoutError for a hole.
    """
    full = Box.full(shape)
    holders: dict[Box, list[int]] = {}
    for index, box in enumerate(boxes):
        if len(box.sizes) != len(shape) or not full.contains(box):
            raise LayoutError(f"{what}: the box {_format(box)} is not inside the shape {list(shape)}")
        if box.volume:
            holders.setdefault(box, []).append(index)
    if full.volume == 0:
        return []
    distinct = list(holders)
    if _are_disjoint(distinct, 0):
        if sum(box.volume for box in distinct) < full.volume:
            _raise_hole(shape, distinct, what)
        return [Cell(box, tuple(found)) for box, found in sorted(holders.items())]
    return _grid(shape, holders, what)


def _are_disjoint(boxes: Sequence[Box], dim: int) -> bool:
    """Return True if splitting dim by dim proves that the boxes are pairwise disjoint."""
    if len(boxes) < 2:
        return True
    if dim == len(boxes[0].sizes):
        return False
    by_interval: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        by_interval.setdefault((box.offsets[dim], box.sizes[dim]), []).append(box)
    intervals = sorted(by_interval)
    for (begin, size), (next_begin, _) in itertools.pairwise(intervals):
        if begin + size > next_begin:
            return False
    return all(_are_disjoint(members, dim + 1) for members in by_interval.values())


def _borders(shape: tuple[int, ...], boxes: Sequence[Box]) -> list[list[int]]:
    borders: list[set[int]] = [{0, size} for size in shape]
    for box in boxes:
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            borders[dim] |= {offset, offset + size}
    return [sorted(dim_borders) for dim_borders in borders]


def _grid_boxes(shape: tuple[int, ...], boxes: Sequence[Box], what: str) -> list[Box]:
    borders = _borders(shape, boxes)
    count = 1
    for dim_borders in borders:
        count *= len(dim_borders) - 1
    if count > _GRID_CELLS:
        raise LayoutError(f"{what}: the boxes of the ranks overlap in too many ways ({count} cells) to form one tensor")
    out = []
    for sides in itertools.product(*(itertools.pairwise(dim_borders) for dim_borders in borders)):
        out.append(Box(tuple(a for a, _ in sides), tuple(b - a for a, b in sides)))
    return out


def _grid(shape: tuple[int, ...], holders: Mapping[Box, list[int]], what: str) -> list[Cell]:
    cells = []
    for box in _grid_boxes(shape, list(holders), what):
        found = sorted(itertools.chain.from_iterable(h for held, h in holders.items() if held.contains(box)))
        if not found:
            raise LayoutError(_hole_message(what, box, shape))
        cells.append(Cell(box, tuple(found)))
    return cells


def _raise_hole(shape: tuple[int, ...], boxes: Sequence[Box], what: str) -> None:
    for box in _grid_boxes(shape, boxes, what):
        if not any(held.contains(box) for held in boxes):
            raise LayoutError(_hole_message(what, box, shape))


def _hole_message(what: str, box: Box, shape: tuple[int, ...]) -> str:
    return (
        f"{what}: no rank holds {_format(box)} of its shape {list(shape)}; "
        "a rank of its mesh omitted it from the state, or declares a wrong shard"
    )


def _format(box: Box) -> str:
    return (
        "[" + ", ".join(f"{offset}:{offset + size}" for offset, size in zip(box.offsets, box.sizes, strict=True)) + "]"
    )


@dataclass(frozen=True, slots=True)
class Holding:
    """The holders of a tensor: its cells, and the rank and box of each holder that the cells refer to."""

    cells: tuple[Cell, ...]
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]

    def first(self) -> Holding:
        """Return a holding in which only the first replica provides the tensor."""
        cells = (Cell(cell.box, (min(cell.holders, key=lambda h: self.ranks[h]),)) for cell in self.cells)
        return Holding(tuple(cells), self.ranks, self.boxes)


class Holdings:
    """A cache of holdings by shape and spread: equal tensors of equal layers share one."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], Spread, bool], Holding] = {}

    def of(self, shape: tuple[int, ...], spread: Spread, what: str, *, first: bool = False) -> Holding:
        """Return the holding of a tensor, or only of its `first` replica; raises LayoutError for a hole."""
        key = (shape, spread, first)
        if key not in self._known:
            if first:
                self._known[key] = self.of(shape, spread, what).first()
            else:
                held = spread.boxes(shape)
                boxes = [box for _, box in held]
                cells = cells_of(shape, boxes, what)
                self._known[key] = Holding(tuple(cells), tuple(rank for rank, _ in held), tuple(boxes))
        return self._known[key]
