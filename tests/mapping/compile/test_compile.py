"""Compiling: which names are targets, which sources are left over, and what order statements run in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.core.errors import HoldfastError, InvalidArgument, Mismatch
from holdfast.format.dtypes import dtype_named
from holdfast.mapping import Compiled, Mapping, Sized
from holdfast.mapping.compile.compile import compile_program
from holdfast.plan.files import TensorSpec
from tests.effort import at_most
from tests.mapping.arrays import numbered, run, same, spec_of, specs_of

A = numbered((4, 6))
F32 = dtype_named("float32")


def compiled(text: str, sources: str, targets: str | None = None, **options: Any) -> Compiled:
    """Compile over keys that all have one shape."""
    wanted = None if targets is None else dict.fromkeys(targets.split())
    return Mapping.parse([text]).compile({key: spec_of(A) for key in sources.split()}, wanted, **options)


def test_without_a_statement_a_target_takes_the_source_of_its_name() -> None:
    found = compiled("", "a b", "b c")
    assert (list(found.recipes), found.missing, found.unused) == (["b"], ("c",), ("a",))
    assert found.made_by == {}


def test_without_targets_they_are_what_is_left_over() -> None:
    assert list(compiled("", "a b").recipes) == ["a", "b"]
    assert list(compiled("a -> t\nt -> c", "a b").recipes) == ["b", "c"]
    assert list(compiled("a^T -> a\nb^T -> b\na, b -> c, axis=0", "a b").recipes) == ["c"]
    assert list(compiled("a -> a\na -> c", "a").recipes) == ["a", "c"]
    assert list(compiled("a -> a\na^T -> a", "a").recipes) == ["a"]
    assert list(compiled("a -> _\n_ -> z", "a b").recipes) == ["b"]


def test_a_source_that_a_statement_used_is_still_the_target_of_its_name() -> None:
    found = compiled("a -> b", "a", "a b")
    assert set(found.recipes) == {"a", "b"}


def test_kept_and_removed() -> None:
    found = compiled("a -> _\n_ -> z\n_ -> b", "a b", "z b")
    assert (found.kept, found.removed, found.unused, found.missing) == (
        frozenset({"z", "b"}),
        frozenset({"a", "b"}),
        (),
        (),
    )
    found = compiled("a -> b\na -> _", "a", "b")
    assert (found.removed, found.unused) == (frozenset(), ())
    found = compiled("a -> _", "a", "a")
    assert found.missing == ("a",)


def test_a_removed_name_cannot_be_used() -> None:
    with pytest.raises(Mismatch, match=r"line 2.*no key matches a"):
        compiled("a -> _\na -> b", "a")


def test_a_part_that_is_not_wanted_can_be_removed() -> None:
    found = compiled("w -> q, k, axis=0\nk -> _", "w", "q")
    assert (set(found.recipes), found.unused, found.removed) == ({"q"}, (), frozenset())


def test_statements_run_in_order_and_a_name_made_again_shadows() -> None:
    found = run("a^T -> a\na -> b\nc -> a", {"a": A, "c": A + 100})
    assert same(found, {"b": A.T, "a": A + 100})


def test_a_name_that_nothing_used_is_not_made_again() -> None:
    with pytest.raises(Mismatch, match=r"line 2.*'b', made by line 1, column 1, is unused"):
        compiled("a -> b\nc -> b", "a c")


def test_combinations_of_one_statement_happen_at_once() -> None:
    arrays = {f"x.{n}": numbered((2,), begin=10 * n) for n in range(3)}
    assert same(run("x.$N -> x.${N+1}", arrays), {f"x.{n + 1}": arrays[f"x.{n}"] for n in range(3)})


def test_order_in_a_statement_is_turn_join_permute_cast() -> None:
    arrays = {"a": numbered((2, 3)), "b": numbered((2, 4), begin=50)}
    found = run("a^T, b^T -> c, axis=0, permute=[1, 0], dtype='float64'", arrays)
    assert same(found, {"c": np.concatenate([arrays["a"].T, arrays["b"].T]).T.astype(np.float64)})
    found = run("c -> d, e^T, permute=[1, 0], axis=0, sizes=[3, 4], dtype='float64'", {"c": numbered((2, 7))})
    whole = numbered((2, 7)).T.astype(np.float64)
    assert same(found, {"d": whole[:3], "e": whole[3:].T})


def test_a_chain_of_casts_keeps_its_rounding() -> None:
    values = np.array([1 / 3, 1e-3], np.float32)
    found = run("a -> t, dtype='float16'\nt -> b, dtype='float32'", {"a": values})
    assert same(found, {"b": values.astype(np.float16).astype(np.float32)})


def test_a_declared_source_dtype_is_checked() -> None:
    with pytest.raises(Mismatch, match="'a' is float32, not bfloat16 as src_dtype= says"):
        compiled("a -> b, src_dtype='bfloat16', dst_dtype='float32'", "a")


def test_negative_axes_and_axes_that_are_not_there() -> None:
    assert same(run("a, b -> c, axis=-1", {"a": A, "b": A}), {"c": np.concatenate([A, A], 1)})
    with pytest.raises(Mismatch, match="axis=2: a tensor of 2 dims has the axes -2 to 1"):
        compiled("a, b -> c, axis=2", "a b")
    with pytest.raises(Mismatch, match="axis=0: a tensor of 0 dims"):
        run("a, b -> c, axis=0", {"a": numbered(()), "b": numbered(())})


def test_permutes_of_another_rank_are_refused() -> None:
    with pytest.raises(Mismatch, match=r"permute=\[2, 0, 1\] needs 3 dims, but there are 2: 'a' \[4, 6\]"):
        compiled("a -> b, permute=[2, 0, 1]", "a")


def test_sizes_on_a_concat_are_checked() -> None:
    with pytest.raises(Mismatch, match=r"sizes=\[2, 6\], but the parts have \[4, 4\]"):
        compiled("a, b -> c, axis=0, sizes=[2, 6]", "a b")
    with pytest.raises(Mismatch, match="3 sizes for 2 parts"):
        compiled("a -> b, c, axis=0, sizes=[1, 1, 2]", "a")


def test_tensors_without_elements_are_carried_along() -> None:
    empty = np.zeros((0, 3), np.float32)
    assert same(run("a -> b", {"a": empty}), {"b": empty})
    assert same(run("a, b -> c, axis=0", {"a": empty, "b": numbered((2, 3))}), {"c": numbered((2, 3))})
    found = Mapping.parse("a, b -> c, axis=0").compile(specs_of({"a": empty, "b": empty}))
    assert found.unused == ()


def test_specs_of_tensors_are_sources_and_targets() -> None:
    found = Mapping.parse("a -> b").compile({"a": TensorSpec("a", F32, (2,))}, {"b": TensorSpec("b", F32, (2,))})
    assert found.recipes["b"].shape == (2,)


def test_degrees_come_from_the_statement_the_target_or_the_source() -> None:
    by_source = compiled("g, u -> w, fused_ffn", "g u", source_tp=2)
    assert by_source.recipes == compiled("g, u -> w, fused_ffn, tp_degree=2", "g u").recipes
    by_target = Mapping.parse("g, u -> w, fused_ffn").compile(
        {"g": spec_of(A), "u": spec_of(A)}, source_tp=1, target_tp={"w": 3}.get
    )
    assert by_target.recipes == compiled("g, u -> w, fused_ffn, tp_degree=3", "g u").recipes
    assert compiled("w -> g, u, fused_ffn", "w", source_tp=3, target_tp=1).recipes == (
        compiled("w -> g, u, fused_ffn, tp_degree=3", "w").recipes
    )
    with pytest.raises(Mismatch, match="the degree of the target is not known: add tp_degree="):
        compiled("g, u -> w, fused_ffn", "g u")
    with pytest.raises(Mismatch, match="the degree of the source is not known"):
        compiled("w -> g, u, fused_ffn", "w")


def test_the_degree_of_a_temporary_is_that_of_the_target_it_goes_into() -> None:
    text = "g, u -> t, fused_ffn\nt^T -> t2\nt2 -> w\nt2 -> x\n"
    sources = {"g": spec_of(A), "u": spec_of(A)}
    found = Mapping.parse(text).compile(sources, {"w": None, "x": None}, source_tp=1, target_tp={"w": 3}.get)
    wanted = Mapping.parse(text.replace("ffn", "ffn, tp_degree=3")).compile(sources)
    assert found.recipes == wanted.recipes
    with pytest.raises(Mismatch, match="'t' is used by targets of several TP degrees: 'w' 3, 'x' 2; add tp_degree="):
        Mapping.parse(text).compile(sources, target_tp={"w": 3, "x": 2}.get)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g, u -> w, fused_ffn, tp_degree=4", r"degree of 4 does not divide the 6 elements.*'g' \[4, 6\]"),
        ("w -> g, u, fused_ffn, tp_degree=2", "degree of 2 does not divide the 3 elements"),
        ("q, k, v -> w, fused_qkv, num_heads=4, num_key_value_groups=2", "6 elements of q do not split evenly"),
        ("q, k, v -> w, fused_qkv, num_heads=6, num_key_value_groups=3", "heads of different sizes: q has 6.*k 6"),
        (
            "w -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2",
            r"a fused dim of 6 does not split evenly into 4 \+ 2 \* 2",
        ),
        ("q, k, v -> w, fused_qkv_old, num_heads=6, num_key_value_groups=6, tp_degree=4", "does not divide 6 heads"),
        ("g, u -> w, fused_ffn, tp_degree=2, axis=2", "axis=2"),
    ],
)
def test_fused_forms_that_do_not_go_together_are_refused(text: str, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        compiled(text, "g u q k v w")


def test_key_value_heads_and_degrees_that_do_not_divide_each_other() -> None:
    arrays = {"q": numbered((1, 12)), "k": numbered((1, 6)), "v": numbered((1, 6))}
    options = "fused_qkv_old, num_heads=12, num_key_value_groups=6"
    with pytest.raises(Mismatch, match="degree of 4 does not divide 6 key and value heads"):
        run(f"q, k, v -> w, {options}, tp_degree=4", arrays)
    arrays = {"q": numbered((1, 12)), "k": numbered((1, 4)), "v": numbered((1, 4))}
    with pytest.raises(Mismatch, match="degree of 6 is not a multiple of 4 key and value heads"):
        run(f"q, k, v -> w, {options.replace('=6', '=4')}, tp_degree=6", arrays)


def test_biases_are_fused_along_their_only_dim() -> None:
    arrays = {"q": numbered((8,)), "k": numbered((4,), begin=10), "v": numbered((4,), begin=20)}
    found = run("q, k, v -> w, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0", arrays)
    assert found["w"].tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]


@pytest.mark.parametrize(
    "statements",
    [
        ["a -> x0", *(f"x{n}, x{n} -> x{n + 1}, axis=0" for n in range(60))],
        ["a -> x[0:3000000], axis=0, sizes=targets"],
        ["q, q2, q3 -> w, fused_qkv, num_heads=900000000, num_key_value_groups=900000000"],
        ["g, u -> w, fused_ffn, tp_degree=900000000"],
        ["f -> e.*, axis=0, parts=900000000"],
    ],
)
def test_a_short_program_cannot_ask_for_endless_work(statements: list[str]) -> None:
    huge = Sized((900_000_000, 900_000_000), F32)
    sources = dict.fromkeys(("a", "q", "q2", "q3", "g", "u", "f"), huge)
    with at_most(5), pytest.raises(InvalidArgument, match="expands to more than 50000 names and boxes"):
        compile_program(Mapping.parse(statements).statements, sources, None, max_work=50_000)


@pytest.mark.full
def test_the_keys_of_a_very_large_model_are_mapped_in_seconds() -> None:
    """61 layers of 256 experts of three weights: joined, stacked and turned, and back."""
    shapes = {"gate": (2048, 7168), "up": (2048, 7168), "down": (7168, 2048)}
    sources = {
        f"layers.{layer}.experts.{expert}.{part}.weight": Sized(shape, F32)
        for layer in range(61)
        for expert in range(256)
        for part, shape in shapes.items()
    }
    expert = "layers.$LAYER_ID.experts.$EXPERT_ID"
    mapping = Mapping.parse(
        f"{expert}.gate.weight^T, {expert}.up.weight^T -> t.$LAYER_ID.$EXPERT_ID, axis=1\n"
        "t.$LAYER_ID.* -> layers.$LAYER_ID.experts.w1, axis=0\n"
        f"{expert}.down.weight^T -> d.$LAYER_ID.$EXPERT_ID\n"
        "d.$LAYER_ID.* -> layers.$LAYER_ID.experts.w2, axis=0\n"
    )
    with at_most(20):
        there = mapping.compile(sources)
        made = {key: Sized(recipe.shape, recipe.dtype) for key, recipe in there.recipes.items()}
        back = mapping.reverse().compile(made, sources)
    assert len(there.recipes) == 2 * 61 and len(back.recipes) == len(sources)
    assert sum(len(recipe.terms) for recipe in back.recipes.values()) == len(sources)


def test_every_refusal_is_an_error_of_holdfast() -> None:
    for text in ("a, b -> c, axis=9", "x -> y", "a -> b, c, axis=0, sizes=[9, 9]"):
        with pytest.raises(HoldfastError):
            compiled(text, "a b")
