"""Reverses: derived where there is one, refused with the statement where not, never equal parts by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.mapping import Mapping
from tests.mapping.arrays import Array, numbered, outputs, run, same, spec_of, specs_of


def back(text: str) -> str:
    return str(Mapping.parse(text + "\n").reverse()).strip()


def there_and_back(text: str, arrays: dict[str, Array], **options: Any) -> dict[str, Array]:
    """What the reverse makes of what the program makes, with the sources as known targets."""
    mapping = Mapping.parse(text + "\n")
    made = outputs(mapping.compile(specs_of(arrays), **options), arrays)
    return outputs(mapping.reverse().compile(specs_of(made), specs_of(arrays), **options), made)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a -> b", "b -> a"),
        ("a^T -> b", "b^T -> a"),
        ("a -> b^T", "b^T -> a"),
        ("a^T -> b^T", "b -> a"),
        ("a -> b, permute='[2,0,1]'", "b -> a, permute='[1, 2, 0]'"),
        ("a^T -> b, permute='[2,0,1]'", "b -> a^T, permute='[1, 2, 0]'"),
        ("a -> b, permute='[]'", "b -> a, permute='[]'"),
        ("a, b^T -> c, axis=1", "c -> a, b^T, axis=1, sizes=targets"),
        ("a, b -> c, axis=1, sizes=[3, 5]", "c -> a, b, axis=1, sizes=[3, 5]"),
        ("c -> a, b, axis=1, sizes=[3, 5]", "a, b -> c, axis=1, sizes=[3, 5]"),
        ("c -> a, b, axis=1", "a, b -> c, axis=1"),
        ("a -> b, src_dtype='bfloat16', dst_dtype='float32'", "b -> a, src_dtype='float32', dst_dtype='bfloat16'"),
        ("a -> _", "_ -> a"),
        ("_ -> z", "z -> _, optional"),
        ("e.*.w -> f, axis=0", "f -> e.*.w, axis=0, sizes=targets"),
        ("f -> e.*.w, axis=0, parts=8", "e.*.w -> f, axis=0, parts=8"),
        ("c.$L -> e.$L.$E, axis=0", "e.$L.* -> c.$L, axis=0"),
        ("c -> x[0:3], axis=0", "x[0:3] -> c, axis=0"),
        ("m.$L.e.$E -> n.$E.$L, optional", "n.$E.$L -> m.$L.e.$E, optional"),
        ("m.$LAYER_ID_OFFSET.w -> n.$LAYER_ID_OFFSET.w", "n.${LAYER_ID-1}.w -> m.$LAYER_ID.w"),
        ("g, u -> w, fused_ffn, tp_degree=2", "w -> g, u, fused_ffn, tp_degree=2"),
        ("w -> x, fused_ffn, tp_degree=2", "x -> w, fused_ffn, src_tp_degree=2"),
        (
            "w -> x, fused_ffn, src_tp_degree=4, dst_tp_degree=2",
            "x -> w, fused_ffn, src_tp_degree=2, dst_tp_degree=4",
        ),
        ("a -> t\nt -> b", "b -> t\nt -> a"),
        ("a -> b\na -> c", "c -> _\nb -> a"),
        ("a -> b, dtype='float16'\na -> c", "c -> a\nb -> _"),
        ("a -> t\nt -> b, dtype='float16'\na -> c", "c -> a\nb -> _"),
        ("a -> a\na -> c", "c -> _\na -> a"),
        ("a -> b\na, c -> d, axis=0", "d -> a, c, axis=0, sizes=targets\na -> _\nb -> a"),
        ("a -> a\na, c -> d, axis=0", "a -> _\nd -> a, c, axis=0, sizes=targets\na -> a"),
        ("a -> b\na -> _", "b -> a"),
    ],
)
def test_statements_turned_round(text: str, wanted: str) -> None:
    assert back(text) == wanted
    assert str(Mapping.parse(wanted + "\n")).strip() == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x -> y\na -> b, dtype='float16'", "line 2, column 1.*no inverse.*src_dtype="),
        ("a, a -> b, axis=0", "line 1.*a source appears twice"),
        ("w -> q, k, axis=0\nk -> _", "line 2, column 1.*k is a part made by line 1, column 1"),
        ("w -> t\nt -> q, k, axis=0\nk -> b, dtype='float16'", "line 3"),
        ("a.$X -> b", "\\$X appears only on the left"),
    ],
)
def test_what_has_no_inverse_is_refused_with_its_statement(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s){message}"):
        Mapping.parse(text + "\n").reverse()


UNEVEN = {"a": numbered((2, 3)), "b": numbered((2, 5), begin=100), "c": numbered((2, 4), begin=200)}


def test_a_reversed_concat_takes_its_sizes_from_the_targets() -> None:
    assert same(there_and_back("a, b, c -> d, axis=1", UNEVEN), UNEVEN)


def test_a_reversed_concat_without_sizes_is_never_cut_into_equal_parts() -> None:
    arrays = {"a": numbered((2, 3)), "b": numbered((2, 3), begin=50)}
    mapping = Mapping.parse("a, b -> d, axis=1")
    made = {"d": np.concatenate(list(arrays.values()), 1)}
    with pytest.raises(Mismatch, match=r"reverse of line 1.*'a', 'b' are not known; add sizes=.*reverse\(shapes\)"):
        mapping.reverse().compile(specs_of(made))
    shapes = {key: array.shape for key, array in arrays.items()}
    assert same(outputs(mapping.reverse(shapes).compile(specs_of(made)), made), arrays)


def test_one_unknown_size_is_what_is_left() -> None:
    made = {"d": np.concatenate([UNEVEN["a"], UNEVEN["b"]], 1)}
    reverse = Mapping.parse("a, b -> d, axis=1").reverse()
    assert same(
        outputs(reverse.compile(specs_of(made), {"a": spec_of(UNEVEN["a"]), "b": None}), made),
        {"a": UNEVEN["a"], "b": UNEVEN["b"]},
    )


def test_sizes_are_found_behind_temporaries_that_are_turned_permuted_and_cut() -> None:
    arrays = {"a": numbered((3, 2)), "b": numbered((2, 5), begin=100), "c": numbered((2, 4), begin=200)}
    text = "b, c -> bc, axis=1\na^T -> t\nt -> t2, permute='[0, 1]'\nt2, bc -> d, axis=1"
    assert same(there_and_back(text, arrays), arrays)


def test_names_are_found_behind_temporaries() -> None:
    arrays = {f"m.{n}.e.{e}.w": numbered((2 + e, 3), begin=99 * n + 20 * e) for n in range(2) for e in range(2 + n)}
    text = "m.$L.e.$E.w^T -> t.$L.$E\nt.$L.$E -> u.$E.$L\nu.*.$L -> f.$L, axis=1"
    assert same(there_and_back(text, arrays), arrays)


def test_a_program_pinned_to_shapes_that_differ_from_layer_to_layer() -> None:
    arrays = {f"m.{n}.{p}": numbered((n + 1 + (p == "u"), 2), begin=50 * n) for n in range(2) for p in "gu"}
    arrays |= {f"e.{n}": numbered((2, 2), begin=300 + 9 * n) for n in (3, 4, 7)}
    mapping = Mapping.parse("m.$L.g, m.$L.u -> n.$L, axis=0\ne.* -> f, axis=0\n")
    made = outputs(mapping.compile(specs_of(arrays)), arrays)
    pinned = mapping.reverse({key: array.shape for key, array in arrays.items()})
    assert "sizes=[1, 2]" in str(pinned) and "sizes=[2, 3]" in str(pinned) and "e.3, e.4, e.7" in str(pinned)
    assert same(outputs(pinned.compile(specs_of(made)), made), arrays)


def test_the_reverse_of_swapped_names() -> None:
    arrays = {"a": numbered((2,)), "b": numbered((3,), begin=10)}
    text = "a -> t\nb -> a\nt -> b"
    assert same(run(text, arrays), {"a": arrays["b"], "b": arrays["a"]})
    assert same(there_and_back(text, arrays), arrays)


def test_names_that_move_up_by_one_move_down_again() -> None:
    arrays = {f"x.{n}": numbered((2,), begin=10 * n) for n in range(4)}
    text = "x.$N -> x.${N+1}"
    assert same(run(text, arrays), {f"x.{n + 1}": arrays[f"x.{n}"] for n in range(4)})
    assert same(there_and_back(text, arrays), arrays)


def test_degrees_of_a_reverse_are_those_of_the_program() -> None:
    arrays = {"g": numbered((2, 8)), "u": numbered((2, 8), begin=50)}
    assert same(there_and_back("g, u -> w, fused_ffn", arrays, source_tp=4), arrays)
    arrays = {"w": numbered((2, 16))}
    assert same(there_and_back("w -> x, fused_ffn, src_tp_degree=2, dst_tp_degree=8", arrays), arrays)


def test_a_cast_is_reversed_where_the_dtypes_of_the_sources_are_given() -> None:
    mapping = Mapping.parse("a.$N^T -> b.$N, dtype='bfloat16'\nc, d -> e, axis=0, dtype='float16'")
    shapes = {
        "a.0": ((4, 6), "float32"),
        "a.1": ((4, 6), "float32"),
        "c": ((1, 6), "float32"),
        "d": ((2, 6), "float32"),
    }
    reverse = mapping.reverse(shapes)
    assert str(reverse) == (
        "e -> c, d, axis=0, sizes=[1, 2], src_dtype='float16', dst_dtype='float32'\n"
        "b.$N^T -> a.$N, src_dtype='bfloat16', dst_dtype='float32'\n"
    )
    with pytest.raises(InvalidArgument, match=r"or pass the sources' dtypes to reverse\(\)"):
        mapping.reverse()
    with pytest.raises(InvalidArgument, match=r"or pass the sources' dtypes to reverse\(\)"):
        mapping.reverse({key: shape for key, (shape, _) in shapes.items()})


def test_sources_of_different_dtypes_come_back_each_with_its_own() -> None:
    mapping = Mapping.parse("a.$N -> b.$N, dtype='bfloat16'")
    reverse = mapping.reverse({"a.0": ((2,), "float32"), "a.1": ((2,), "float64")})
    lines = sorted(str(reverse).splitlines())
    assert lines == [
        "b.0 -> a.0, src_dtype='bfloat16', dst_dtype='float32'",
        "b.1 -> a.1, src_dtype='bfloat16', dst_dtype='float64'",
    ]
