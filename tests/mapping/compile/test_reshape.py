"""`reshape=`: the same elements in row-major order, whatever else a program does with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.mapping import Mapping
from holdfast.mapping.optimizer_state import Scalar, map_state
from tests.mapping.arrays import numbered, run, same, spec_of, specs_of

FLAT, LONG = (6, 4), (2, 3, 2, 2)
A = numbered(FLAT)


def test_a_tensor_takes_the_shape() -> None:
    assert same(run("a -> b, reshape=[2, 3, 2, 2]", {"a": A}), {"b": A.reshape(LONG)})
    assert same(run("a -> b, reshape='[2, 3, 2, 2]'", {"a": A}), {"b": A.reshape(LONG)})
    assert same(run("a -> b, reshape=[24]", {"a": A}), {"b": A.reshape(24)})
    assert same(run("a -> b, reshape=[1, 6, 1, 4]", {"a": A}), {"b": A.reshape(1, 6, 1, 4)})


def test_as_paddle_writes_it_one_statement_goes_from_either_shape_to_the_other() -> None:
    program = {"aoa_statements": ["a -> b, reshape = '[2, 3, 2, 2]'"]}
    long, flat = A.reshape(LONG), {"b": spec_of(A)}
    assert same(run(program, {"a": A}, {"b": spec_of(long)}), {"b": long})
    assert same(run(program, {"a": long}, flat), {"b": A})
    assert same(run(program, {"a": long}, {"b": spec_of(long)}), {"b": long})


def test_with_joins_turns_and_casts() -> None:
    parts = {"a": A[:3], "b": A[3:]}
    assert same(run("a, b -> c, axis=0, reshape=[2, 3, 4]", parts), {"c": A.reshape(2, 3, 4)})
    assert same(run("a^T -> c, reshape=[2, 2, 6], dtype='float64'", {"a": A}), {"c": A.T.reshape(2, 2, 6).astype("f8")})
    assert same(run("a -> c^T, reshape=[2, 2, 6]", {"a": A}), {"c": A.reshape(2, 2, 6).T})
    assert same(run("a -> c, permute='[1, 0]', reshape=[24]", {"a": A}), {"c": A.T.reshape(24)})


def test_a_tensor_is_reshaped_before_it_is_cut() -> None:
    long = A.reshape(2, 3, 4)
    assert same(run("a -> b, c, axis=0, reshape=[2, 3, 4]", {"a": A}), {"b": long[:1], "c": long[1:]})


def test_experts_stacked_from_a_flat_weight() -> None:
    flat = numbered((8, 6))
    wanted = {f"e.{n}": flat.reshape(4, 2, 6)[n] for n in range(4)}
    assert same(run("w -> t, reshape=[4, 2, 6]\nt -> e.*, axis=0, unstack, parts=4", {"w": flat}), wanted)


@pytest.mark.parametrize(
    ("text", "shape", "words"),
    [
        ("a -> b, reshape=[5, 5]", FLAT, r"'a' \[6, 4\] cannot be reshaped to \[5, 5\]: 24 elements do not fill 25"),
        ("a -> b, reshape=[0, 3]", (0, 4), "the tensor is empty"),
        ("a -> b, reshape=targets", FLAT, r"the shape of 'b' is not known; add reshape=\[...\]"),
        (
            "a -> b, reshape=[24], src_shape=[4, 6]",
            FLAT,
            r"shape before reshape is \[6, 4\], not \[4, 6\] as src_shape=",
        ),
    ],
)
def test_what_does_not_fit_is_refused(text: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(Mismatch, match=words):
        run(text, {"a": numbered(shape)})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("g, u -> w, fused_ffn, reshape=[2]", "cannot be combined with reshape="),
        ("a -> b, src_shape=[2]", "needs reshape="),
        ("a -> b, reshape=2", "is not a list of integers"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Mapping.parse(text)


def test_the_reverse_goes_by_the_targets_or_by_given_shapes() -> None:
    mapping = Mapping.parse("a^T -> b, reshape=[2, 2, 6]")
    there = run(mapping, {"a": A})
    assert str(mapping.reverse()) == "b -> a^T, reshape=targets, src_shape=[2, 2, 6]\n"
    assert same(run(mapping.reverse(), there, {"a": spec_of(A)}), {"a": A})
    pinned = mapping.reverse({"a": FLAT})
    assert str(pinned) == "b -> a^T, reshape=[4, 6], src_shape=[2, 2, 6]\n"
    assert same(run(pinned, there), {"a": A})
    assert str(pinned.reverse()) == "a^T -> b, reshape=[2, 2, 6], src_shape=[4, 6]\n"
    with pytest.raises(InvalidArgument, match="permute= and reshape= are inverted in the opposite order"):
        Mapping.parse("a -> b, permute='[1, 0]', reshape=[24]").reverse()


def test_a_joined_and_reshaped_weight_comes_back() -> None:
    mapping, parts = Mapping.parse("a, b -> c, axis=0, reshape=[2, 3, 4]"), {"a": A[:2], "b": A[2:]}
    there = run(mapping, parts)
    assert same(run(mapping.reverse(), there, specs_of(parts)), parts)
    assert same(run(mapping.reverse({key: value.shape for key, value in parts.items()}), there), parts)


def test_moments_follow_a_reshaped_parameter() -> None:
    compiled = Mapping.parse("a -> b, reshape=[2, 3, 2, 2], dtype='bfloat16'").compile({"a": spec_of(A)})
    recipe = map_state(compiled, {"a": spec_of(A)})["b"]
    assert not isinstance(recipe, Scalar)
    assert recipe.shape == LONG and recipe.dtype.name == "float32"


def test_it_is_explained() -> None:
    told = Mapping.parse("a -> b, reshape=[2, 3, 4]").explain({"a": FLAT})
    assert "[0:1, 0:3, 0:4] <- a [0:3, 0:4], dims [new, 0, 1]" in told


def test_a_large_weight_is_few_boxes() -> None:
    compiled = Mapping.parse("w -> c, reshape=[256, 7168, 2, 2048]").compile({"w": spec(256 * 7168, 4096)})
    assert len(compiled.recipes["c"].terms) == 512
    back = Mapping.parse("w -> c, reshape=[1835008, 4096]").compile({"w": spec(256, 7168, 2, 2048)})
    assert len(back.recipes["c"].terms) == 512


def spec(*shape: int):
    from holdfast.format.dtypes import dtype_named
    from holdfast.mapping import Sized

    return Sized(shape, dtype_named("bfloat16"))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.data())
def test_numpy_and_holdfast_reshape_alike(factors: list[int], data: st.DataObject) -> None:
    """Any two shapes of the same factors, each in an order of its own."""

    def merged() -> tuple[int, ...]:
        mixed = data.draw(st.permutations(factors))
        cuts = data.draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        out = [1]
        for factor, cut in zip(mixed, cuts, strict=True):
            out = [*out, factor] if cut else [*out[:-1], out[-1] * factor]
        return tuple(out)

    source, target = merged(), merged()
    array = np.arange(math.prod(factors), dtype=np.float32).reshape(source)
    there = run(f"a -> b, reshape={list(target)}", {"a": array})
    assert same(there, {"b": array.reshape(target)})
    assert same(run(f"b -> a, reshape={list(source)}", there), {"a": array})
