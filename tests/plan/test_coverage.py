"""Cover: holes are found and named, overlaps are cut into cells."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import LayoutError
from holdfast.layout.box import Box
from holdfast.plan import coverage
from holdfast.plan.coverage import Cell, Holding, cells_of


def test_a_hole_is_named_by_its_place() -> None:
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (2, 3))]
    with pytest.raises(LayoutError, match=r"w: no rank holds \[2:4, 3:4\] of its shape \[4, 4\]"):
        cells_of((4, 4), boxes, "w")
    with pytest.raises(LayoutError, match=r"no rank holds \[0:4, 0:4\]"):
        cells_of((4, 4), [], "w")


def test_a_box_outside_the_shape_is_refused() -> None:
    with pytest.raises(LayoutError, match="is not inside the shape"):
        cells_of((4,), [Box((2,), (3,))], "w")


def test_a_box_of_other_dims_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"w: the box \[0:2\] is not inside the shape \[4, 4\]"):
        cells_of((4, 4), [Box((0,), (2,))], "w")


def test_an_empty_tensor_has_no_cells() -> None:
    assert cells_of((0, 4), [Box((0, 0), (0, 4))], "w") == []


def test_replicas_of_a_box_share_its_cell() -> None:
    top, bottom = Box((0,), (2,)), Box((2,), (2,))
    assert cells_of((4,), [bottom, top, bottom], "w") == [Cell(top, (1,)), Cell(bottom, (0, 2))]


def test_boxes_that_overlap_in_too_many_ways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4)), Box((0, 0), (4, 2)), Box((0, 2), (4, 2))]
    monkeypatch.setattr(coverage, "_GRID_CELLS", 4)
    assert len(cells_of((4, 4), boxes, "w")) == 4
    monkeypatch.setattr(coverage, "_GRID_CELLS", 3)
    with pytest.raises(LayoutError, match=r"w: the boxes of the ranks overlap in too many ways \(4 cells\)"):
        cells_of((4, 4), boxes, "w")


def test_disjoint_boxes_may_be_as_many_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "_GRID_CELLS", 1)
    quarters = [Box((row, column), (2, 2)) for row in (0, 2) for column in (0, 2)]
    assert [cell.box for cell in cells_of((4, 4), quarters, "w")] == quarters


def test_only_the_replica_of_the_lowest_rank_is_the_first() -> None:
    top, bottom = Box((0,), (2,)), Box((2,), (2,))
    holding = Holding((Cell(top, (0, 1, 2)), Cell(bottom, (3,))), (7, 3, 5, 9), (top, top, top, bottom))
    first = holding.first()
    assert first.cells == (Cell(top, (1,)), Cell(bottom, (3,)))
    assert (first.ranks, first.boxes) == (holding.ranks, holding.boxes)


def test_rows_against_columns_are_cut_into_cells() -> None:
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (2, 4)), Box((0, 0), (4, 2)), Box((0, 2), (4, 2))]
    cells = cells_of((4, 4), boxes, "w")
    assert [cell.holders for cell in cells] == [(0, 2), (0, 3), (1, 2), (1, 3)]


@given(st.data())
def test_cells_cover_once_and_name_every_holder(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = [Box.full(shape)] if data.draw(st.booleans()) else []
    for _ in range(data.draw(st.integers(0, 4))):
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(data.draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
        boxes.append(Box(offsets, sizes))
    held = np.zeros((len(boxes), *shape), dtype=bool)
    for index, box in enumerate(boxes):
        held[index][box.within(Box.full(shape))] = True
    if not held.any(axis=0).all():
        with pytest.raises(LayoutError, match="no rank holds"):
            cells_of(shape, boxes, "w")
        return
    seen = np.zeros(shape, dtype=int)
    for cell in cells_of(shape, boxes, "w"):
        seen[cell.box.within(Box.full(shape))] += 1
        for point in itertools.product(*(range(a, b) for a, b in zip(cell.box.offsets, cell.box.stops, strict=True))):
            here: Any = held[:, *point]  # type: ignore[arg-type]
            assert set(cell.holders) == set(np.flatnonzero(here))
    assert (seen == 1).all()
