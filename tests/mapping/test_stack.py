"""`stack`: parts as the slices of a new dim, and back, against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError, InvalidArgument, Mismatch
from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.mapping.program import Mapping
from holdfast.mapping.syntax.statement import Sized
from holdfast.plan.recipe import Recipe, to_target_dims

F32 = dtype_named("float32")
State = dict[str, np.ndarray]


def run(text: str, arrays: State, targets: dict[str, tuple[int, ...]] | None = None) -> State:
    sources = {key: Sized(array.shape, F32) for key, array in arrays.items()}
    wanted = None if targets is None else {key: Sized(shape, F32) for key, shape in targets.items()}
    compiled = Mapping.parse(text).compile(sources, wanted)
    return {key: made(recipe, arrays, Box.full(recipe.shape)) for key, recipe in compiled.recipes.items()}


def made(recipe: Recipe[str], arrays: State, box: Box) -> np.ndarray:
    out = np.full(box.sizes, np.nan)
    for term in recipe.overlapping(box):
        part = arrays[term.source][term.part.within(Box.full(arrays[term.source].shape))]
        out[term.box.within(box)] = to_target_dims(part, term.order)
    return out


def numbered(*shapes: tuple[int, ...], name: str = "e.{}.w") -> State:
    return {
        name.format(number): np.arange(np.prod(shape, dtype=int), dtype=float).reshape(shape) + 1000 * number
        for number, shape in enumerate(shapes)
    }


@given(st.integers(1, 12), st.lists(st.integers(1, 3), max_size=3).map(tuple), st.data())
def test_stack_and_unstack_are_numpys(count: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    arrays = numbered(*[shape] * count)
    axis = data.draw(st.integers(-len(shape) - 1, len(shape)))
    turn = data.draw(st.sampled_from(["", "^T"]))
    stacked = run(f"e.*.w{turn} -> f, axis={axis}, stack", arrays)
    parts = [array.T if turn else array for array in arrays.values()]
    np.testing.assert_array_equal(stacked["f"], np.stack(parts, axis))
    back = run(f"f -> e.*.w{turn}, axis={axis}, stack", stacked)
    assert list(back) == list(arrays)
    for key, array in arrays.items():
        np.testing.assert_array_equal(back[key], array)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_box_of_a_stack_reads_the_boxes_of_its_parts_and_no_more(
    count: int, rows: int, columns: int, data: st.DataObject
) -> None:
    arrays = numbered(*[(rows, columns)] * count)
    sources = {key: Sized(array.shape, F32) for key, array in arrays.items()}
    recipe = Mapping.parse("e.*.w^T -> f, axis=1, stack").compile(sources).recipes["f"]
    begins = [data.draw(st.integers(0, size - 1)) for size in recipe.shape]
    sizes = [data.draw(st.integers(1, n - b)) for b, n in zip(begins, recipe.shape, strict=True)]
    box = Box(tuple(begins), tuple(sizes))
    expected = np.stack([array.T for array in arrays.values()], 1)[box.within(Box.full(recipe.shape))]
    np.testing.assert_array_equal(made(recipe, arrays, box), expected)
    assert sum(term.part.volume for term in recipe.overlapping(box)) == box.volume


def test_stacks_of_stacks_and_back_without_knowing_the_targets() -> None:
    arrays = {f"l.{a}.e.{b}": np.full((2, 3), 10.0 * a + b) for a in range(3) for b in range(4)}
    there = run("l.$LAYER_ID.e.* -> t.$LAYER_ID, axis=0, stack\nt.* -> all, axis=0, stack", arrays)
    assert there["all"].shape == (3, 4, 2, 3)
    assert there["all"][2, 1, 0, 0] == 21
    back = run("all -> t.*, axis=0, stack\nt.$LAYER_ID -> l.$LAYER_ID.e.*, axis=0, stack", there)
    assert back.keys() == arrays.keys()
    assert all((back[key] == array).all() for key, array in arrays.items())


def test_how_many_slices_a_star_names_follows_renames_turns_and_permutations() -> None:
    whole = {"f": np.arange(24.0).reshape(2, 3, 4)}
    back = run("f^T -> g\ng -> h, permute=[1, 0, 2]\nh -> e.*, axis=0, stack", whole)
    np.testing.assert_array_equal(np.stack(list(back.values())), whole["f"].transpose(1, 2, 0))


def test_named_slices_and_arrays() -> None:
    arrays = numbered((2,), (2,), name="x_{}")
    stacked = run("x[0:2] -> f, axis=0, stack", arrays)
    np.testing.assert_array_equal(run("f -> a, b, axis=0, stack", stacked)["b"], arrays["x_1"])


def test_where_targets_are_known_slices_have_their_names() -> None:
    whole = {"f": np.arange(6.0).reshape(3, 2)}
    parts = run("f -> e.*, axis=0, stack", whole, {f"e.{number}": (2,) for number in range(3)})
    np.testing.assert_array_equal(parts["e.2"], [4, 5])


@pytest.mark.parametrize(
    ("text", "leaf", "words"),
    [
        ("e.0.w -> b, axis=0, unstack", Mismatch, "has 2 slices along axis 0, but there are 1 keys"),
        ("e.*.w -> b, axis=0, unstack", InvalidArgument, "unstack splits one tensor"),
        ("e.0.w -> b, stack", InvalidArgument, "axis= is missing"),
        ("e.*.w -> f, stack", InvalidArgument, "axis= is missing"),
        ("e.*.w -> f, axis=0, stack, sizes=[1, 1]", InvalidArgument, "stack takes no sizes="),
        ("a, b -> c, fused_ffn, stack", InvalidArgument, "cannot be combined with stack"),
        ("e.*.w -> f, axis=3, stack", Mismatch, "a tensor of 3 dims has the axes -3 to 2"),
        ("e.*.w, other -> f, axis=0, stack", Mismatch, "stacked parts must have equal shapes"),
        ("e.0.w -> a, b, c, axis=0, stack", Mismatch, "has 2 slices along axis 0, but there are 3 keys"),
        ("e.*.w -> f, axis=0, fused_stack", InvalidArgument, "is not an option"),
    ],
)
def test_what_cannot_be_stacked_is_refused(text: str, leaf: type[HoldfastError], words: str) -> None:
    with pytest.raises(leaf, match=words):
        run(text, {**numbered((2, 3), (2, 3)), "other": np.zeros((3, 2))})


def test_one_key_is_a_stack_of_one_and_unstack_says_that_it_is_cut() -> None:
    arrays = {"a": np.arange(3.0)}
    stacked = run("a -> b, axis=0, stack", arrays)
    np.testing.assert_array_equal(stacked["b"], [[0, 1, 2]])
    np.testing.assert_array_equal(run("b -> a, axis=0, unstack", stacked)["a"], arrays["a"])
    assert str(Mapping.parse("a -> b, axis=0, stack").reverse()) == "b -> a, axis=0, unstack\n"
    assert str(Mapping.parse("a^T -> b, axis=0, stack").reverse()) == "b -> a^T, axis=0, unstack\n"
    assert Mapping.parse("f -> e.*, axis=0, stack") == Mapping.parse("f -> e.*, axis=0, unstack")


def test_a_stacked_program_prints_as_it_parses() -> None:
    mapping = Mapping.parse("e.*.w^T -> f, axis=0, stack, optional")
    assert Mapping.parse(str(mapping)) == mapping
