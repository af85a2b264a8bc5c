"""Recipes: parts of a tensor are what numpy cuts, and terms that belong together become one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan.recipe import Recipe, Term, is_filled
from tests.mapping.arrays import made, numbered

F32 = dtype_named("float32")


@settings(max_examples=300)
@given(st.data())
def test_split_is_what_numpy_splits_and_concat_joins_it_again(data: st.DataObject) -> None:
    shapes = st.tuples(st.integers(1, 4), st.integers(1, 4))
    arrays = {"a": numbered(data.draw(shapes))}
    arrays["b"] = numbered((arrays["a"].shape[0], data.draw(st.integers(0, 4))), begin=100)
    whole = Recipe.concat([Recipe.whole(key, array.shape, F32) for key, array in arrays.items()], 1).transposed()
    wanted = np.concatenate(list(arrays.values()), 1).T
    dim = data.draw(st.integers(0, 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, wanted.shape[dim]), max_size=4)))
    pieces = np.split(wanted, cuts, dim)
    parts = whole.split(dim, [piece.shape[dim] for piece in pieces])
    for part, piece in zip(parts, pieces, strict=True):
        assert is_filled(part) and np.array_equal(made(part, arrays)[0], piece)
    assert np.array_equal(made(Recipe.concat(parts, dim), arrays)[0], wanted)


def test_split_cuts_a_row_as_narrow_does() -> None:
    whole = Recipe.whole("a", (6, 2), F32).permuted((1, 0))
    assert whole.split(1, [1, 3, 2])[1] == whole.narrow(1, 1, 3)


def test_neighbours_in_one_source_become_one_term_again() -> None:
    whole = Recipe.whole("a", (6, 2), F32)
    assert Recipe.concat(whole.split(0, [1, 2, 3]), 0) == whole


def of_boxes(shape: tuple[int, ...], *boxes: Box) -> Recipe[str]:
    return Recipe(shape, F32, tuple(Term(box, "a", box, tuple(range(len(shape)))) for box in boxes))


def test_terms_that_cover_each_element_once_fill_a_recipe() -> None:
    assert is_filled(of_boxes((4, 2), Box((0, 0), (1, 2)), Box((1, 0), (3, 2))))


def test_a_recipe_with_a_hole_is_not_filled() -> None:
    assert not is_filled(of_boxes((4,), Box((0,), (3,))))


def test_a_recipe_with_an_overlap_is_not_filled() -> None:
    assert not is_filled(of_boxes((4,), Box((0,), (2,)), Box((1,), (2,))))


def test_a_term_outside_of_the_target_does_not_fill_it() -> None:
    assert not is_filled(of_boxes((4,), Box((0,), (2,)), Box((4,), (2,))))
