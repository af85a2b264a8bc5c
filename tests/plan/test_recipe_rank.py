"""Recipes whose sources have another rank: stacked and unstacked tensors against numpy."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan.files import ArrayDestination, Place, TensorSpec
from holdfast.plan.recipe import NEW, Recipe, destinations_of, is_filled, to_source_dims, to_target_dims

F32 = dtype_named("float32")


@dataclass(frozen=True)
class Twin:
    """A recipe and the array that it must give."""

    recipe: Recipe[Place]
    array: np.ndarray


class PutOnly:
    """A destination without live memory: everything comes through `put`."""

    def __init__(self, array: np.ndarray) -> None:
        self.inner = ArrayDestination(array)

    def flat(self) -> None:
        return None

    def direct(self) -> None:
        return None

    def put(self, part: Box, data: np.ndarray) -> None:
        self.inner.put(part, data)


def source(number: int, shape: tuple[int, ...]) -> Twin:
    spec = TensorSpec(f"s{number}", F32, shape)
    array = (np.arange(np.prod(shape, dtype=int), dtype=np.uint32) + 10_000 * number).reshape(shape)
    return Twin(Recipe.whole(Place(spec, "f", number), shape, F32), array)


def evaluated(recipe: Recipe[Place], box: Box, arrays: dict[Place, np.ndarray], *, direct: bool) -> np.ndarray:
    out = np.full(box.sizes, 2**32 - 1, np.uint32)
    inner = ArrayDestination(out) if direct else PutOnly(out)
    for (place, part), destination in destinations_of(recipe, box, inner):
        data = arrays[place][part.within(Box.full(place.spec.shape))]
        live = destination.direct()
        if live is not None:
            live[...] = data
            continue
        half = part.sizes[0] // 2 if part.sizes else 0  # in two pieces, as reads come
        for begin, size in ((0, half), (half, part.sizes[0] - half)) if half else ():
            piece = Box((begin, *(0,) * (len(part.sizes) - 1)), (size, *part.sizes[1:]))
            destination.put(piece, data[begin : begin + size])
        if not half:
            destination.put(Box.full(part.sizes), data)
    return out


@st.composite
def twins(draw: st.DrawFn) -> tuple[Twin, dict[Place, np.ndarray]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=3)))
    parts = [source(number, shape) for number in range(draw(st.integers(1, 3)))]
    arrays = {part.recipe.terms[0].source: part.array for part in parts}
    twin = parts[0]
    for step in draw(st.lists(st.sampled_from(["stack", "cut", "permute", "narrow", "over", "concat"]), max_size=6)):
        if twin.array.size > 2000:
            break
        twin = applied(draw, step, twin, parts)
    return twin, arrays


def applied(draw: st.DrawFn, step: str, twin: Twin, parts: list[Twin]) -> Twin:
    recipe, array, rank = twin.recipe, twin.array, twin.array.ndim
    if step == "stack":
        dim = draw(st.integers(0, rank))
        alike = [twin, *(part for part in parts if part.array.shape == array.shape)]
        stacked = Recipe.concat([part.recipe.unsqueezed(dim) for part in alike], dim)
        return Twin(stacked, np.stack([part.array for part in alike], dim))
    if step == "permute":
        order = draw(st.permutations(range(rank)))
        return Twin(recipe.permuted(order), array.transpose(order))
    if step == "over":
        other = Recipe.whole("middle", array.shape, F32).transposed().unsqueezed(0)
        return Twin(other.substituted(lambda _: recipe), array.transpose()[None])
    if not rank:
        return twin
    dim = draw(st.integers(0, rank - 1))
    begin = draw(st.integers(0, array.shape[dim] - 1))
    if step == "cut":
        return Twin(recipe.narrow(dim, begin, 1).squeezed(dim), array.take(begin, dim))
    if step == "narrow":
        size = draw(st.integers(1, array.shape[dim] - begin))
        return Twin(recipe.narrow(dim, begin, size), array.take(range(begin, begin + size), dim))
    return Twin(Recipe.concat([recipe, recipe], dim), np.concatenate([array, array], dim))


@pytest.mark.slow
@settings(max_examples=600)
@given(st.data(), st.booleans())
def test_any_chain_of_steps_gives_what_numpy_gives_on_any_box(data: st.DataObject, direct: bool) -> None:
    twin, arrays = data.draw(twins())
    assert twin.recipe.shape == twin.array.shape
    assert is_filled(twin.recipe)
    begins = [data.draw(st.integers(0, size - 1)) for size in twin.array.shape]
    sizes = [data.draw(st.integers(1, n - b)) for b, n in zip(begins, twin.array.shape, strict=True)]
    box = Box(tuple(begins), tuple(sizes))
    np.testing.assert_array_equal(
        evaluated(twin.recipe, box, arrays, direct=direct), twin.array[box.within(Box.full(twin.array.shape))]
    )


def test_a_stack_that_was_cut_apart_is_one_plain_term_again() -> None:
    whole = source(0, (4, 3, 2)).recipe
    parts = [whole.narrow(0, number, 1).squeezed(0) for number in range(4)]
    assert [part.shape for part in parts] == [(3, 2)] * 4
    assert Recipe.concat([part.unsqueezed(0) for part in parts], 0) == whole


def test_what_was_stacked_and_cut_apart_is_the_sources_again() -> None:
    sources = [source(number, (3, 2)).recipe for number in range(4)]
    stacked = Recipe.concat([recipe.unsqueezed(1) for recipe in sources], 1)
    assert stacked.shape == (3, 4, 2)
    assert stacked.terms[2].order == (0, NEW, 1)
    assert [stacked.narrow(1, number, 1).squeezed(1) for number in range(4)] == sources
    assert all(recipe.terms[0].is_plain for recipe in sources)
    assert not stacked.terms[0].is_plain


def test_turned_views_share_memory_and_undo_each_other() -> None:
    array = np.arange(24, dtype=np.uint32).reshape(4, 1, 6)
    view = to_target_dims(array, (2, NEW, 0))
    assert view.shape == (6, 1, 4)
    assert np.shares_memory(view, array)
    back = to_source_dims(view, (2, NEW, 0), 3)
    assert back.shape == (4, 1, 6)
    assert np.shares_memory(back, array)
    np.testing.assert_array_equal(back, array)
