"""Holdings: a tensor cut into cells, with the ranks that hold each."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.layout.box import Box
from holdfast.layout.spread import Spread
from holdfast.plan.check import Cell, cells_of


@dataclass(frozen=True, slots=True)
class Holding:
    """Who holds a tensor: its cells, and the rank and box of each holder they name."""

    cells: tuple[Cell, ...]
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]

    def first(self) -> Holding:
        """The same tensor, held by the first replica alone, so that all of it comes from there."""
        cells = (Cell(cell.box, (min(cell.holders, key=lambda h: self.ranks[h]),)) for cell in self.cells)
        return Holding(tuple(cells), self.ranks, self.boxes)


class Holdings:
    """Holdings by shape and spread, each computed once: equal tensors of equal layers share theirs."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], Spread, bool], Holding] = {}

    def of(self, shape: tuple[int, ...], spread: Spread, what: str, *, first: bool = False) -> Holding:
        """The holding of a tensor, of its `first` replica alone if told; raises LayoutError for a hole."""
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
