"""Expansion: ids are joined, stars collect in numeric order, right sides are filled from ids, targets or parts."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Mismatch
from holdfast.mapping import Mapping
from holdfast.mapping.expand.expand import WorkBudget, expand


def steps(text: str, sources: str, targets: str | None = None) -> list[tuple[str, str]]:
    """The steps of all statements, each side as its names."""
    wanted = None if targets is None else targets.split()
    expansions = expand(Mapping.parse([text]).statements, dict.fromkeys(sources.split()), wanted, WorkBudget())
    return [(" ".join(step.lefts), " ".join(step.rights)) for found in expansions for step in found.steps]


def test_ids_in_numeric_order() -> None:
    assert steps("m.$L.w -> n.$L", "m.10.w m.9.w m.x.w m.1.v") == [("m.9.w", "n.9"), ("m.10.w", "n.10")]


def test_a_hole_is_a_run_of_digits_anywhere_in_a_key() -> None:
    assert steps("h$L.w2 -> n$L", "h3.w2 h4.w3 h5x.w2 hh6.w2") == [("h3.w2", "n3")]
    assert steps("w1$L -> n$L", "w12 w1 w22 w13") == [("w12", "n2"), ("w13", "n3")]
    assert steps("w${L}9x -> n$L", "w19x w9x w99x") == [("w19x", "n1"), ("w99x", "n9")]


def test_zeros_in_front_stay() -> None:
    assert steps("m.$L -> n.$L", "m.007 m.7") == [("m.007", "n.007"), ("m.7", "n.7")]
    with pytest.raises(Mismatch, match="no key matches"):
        steps("m.${L+1} -> n.$L", "m.007")


def test_an_id_that_stands_twice_is_one_value() -> None:
    assert steps("a.$L.b.$L -> n.$L", "a.1.b.1 a.1.b.2") == [("a.1.b.1", "n.1")]
    assert steps("a.$L.b.${L+1} -> n.$L", "a.1.b.1 a.1.b.2") == [("a.1.b.2", "n.1")]


def test_left_keys_are_joined_by_the_ids_that_they_share() -> None:
    found = steps("a.$L.$E, b.$L, c -> d.$L.$E, axis=0", "a.0.0 a.0.1 a.1.0 b.0 b.1 c")
    assert found == [("a.0.0 b.0 c", "d.0.0"), ("a.0.1 b.0 c", "d.0.1"), ("a.1.0 b.1 c", "d.1.0")]
    found = steps("b.$L, x.$E, a.$L.$E -> d.$L.$E, axis=0", "a.0.0 a.1.1 b.0 b.1 x.0 x.1")
    assert found == [("b.0 x.0 a.0.0", "d.0.0"), ("b.1 x.1 a.1.1", "d.1.1")]


@pytest.mark.parametrize(
    ("text", "sources", "message"),
    [
        ("a.$X, b.$Y -> c.$X.$Y, axis=0", "a.1 b.1", "have nothing in common with \\$X"),
        ("a.$L.$E, b.$L -> d.$L.$E, axis=0", "a.0.0 a.1.0 b.0", "'a.1.0' exists, but not b.1"),
        ("a.$L.$E, b.$L -> d.$L.$E, axis=0", "a.0.0 b.0 b.1", "'b.1' exists, but not a.1.\\$E"),
        ("a.$L.*, b.$L -> d.$L, axis=0", "a.0.0 b.0 b.1", "'b.1' exists, but not a.1.\\*"),
        ("a, b -> c, axis=0", "a", "'a' exists, but not b"),
        ("a, b -> c, axis=0, optional", "a", "'a' exists, but not b"),
        ("a.$L.$E -> c.$L", "a.0.0 a.0.1", "'c.0' would be made more than once.*write \\*"),
        ("a -> b, b, axis=0", "a", "'b' would be made more than once"),
        ("m.$LAYER_ID_OFFSET -> n.$LAYER_ID_OFFSET", "m.0 m.1", "\\$LAYER_ID is 0: .* has no valid number"),
        ("f -> e.*, axis=0", "f", "unknown without targets: add parts="),
        ("f.$L -> e.$L.$E.$N, axis=0, parts=2", "f.0", "at most one hole can appear only on the right"),
        ("e.* -> f, axis=0, parts=3", "e.0 e.1", "parts=3, but the left side matches 2 keys"),
    ],
)
def test_combinations_that_do_not_come_out_are_refused(text: str, sources: str, message: str) -> None:
    with pytest.raises(Mismatch, match=message):
        steps(text, sources)


def test_stars_and_several_keys_collect_one_after_another() -> None:
    assert steps("e.*.g, e.*.u -> f, axis=0", "e.10.g e.2.g e.0.u") == [("e.2.g e.10.g e.0.u", "f")]


def test_right_holes_are_filled_from_the_targets_in_numeric_order() -> None:
    assert steps("f.$L -> e.$L.*, axis=0", "f.1", "e.1.10 e.1.9 e.2.1") == [("f.1", "e.1.9 e.1.10")]
    assert steps("f.$L -> e.$L.$E, axis=0", "f.1", "e.1.10 e.1.9 e.2.1") == [("f.1", "e.1.9 e.1.10")]
    with pytest.raises(Mismatch, match=r"no target matches e\.\*; similar names: 'g\.0'"):
        steps("f -> e.*, axis=0", "f", "g.0")


def test_right_holes_are_counted_by_parts() -> None:
    assert steps("f -> e.*.w, axis=0, parts=3", "f", "e.7.w") == [("f", "e.0.w e.1.w e.2.w")]


def test_right_holes_of_a_temporary_are_those_of_the_targets_that_are_made_of_it() -> None:
    text = "f.$L -> t.$L.*, axis=0\nt.$L.$E^T -> u.$E.$L\nu.$E.$L -> n.$L.e.$E.w"
    found = steps(text, "f.0 f.1", "n.0.e.0.w n.0.e.3.w n.1.e.5.w")
    assert found[:2] == [("f.0", "t.0.0 t.0.3"), ("f.1", "t.1.5")]
    assert found[-1] == ("u.5.1", "n.1.e.5.w")


def test_right_holes_are_also_the_names_that_later_statements_use() -> None:
    text = "e.9 -> x\nf -> e.*, axis=0\ne.0 -> first\ne.5, y -> z, axis=0"
    assert steps(text, "f y e.9", "x first z e.2")[1] == ("f", "e.0 e.2 e.5")


def test_arrays_on_both_sides() -> None:
    assert steps("c -> x[0:3], axis=0\nx[0:2] -> y, axis=0", "c") == [("c", "x_0 x_1 x_2"), ("x_0 x_1", "y")]


def test_names_that_were_made_are_matched_and_removed_ones_are_not() -> None:
    found = steps("a -> e.2\ne.1 -> _\ne.* -> f, axis=0", "a e.0 e.1")
    assert found[-1] == ("e.0 e.2", "f")


def test_removes_and_adds_take_patterns() -> None:
    assert steps("m.$L.rot, n.* -> _", "m.1.rot m.0.rot n.3 x") == [("m.1.rot", ""), ("m.0.rot", ""), ("n.3", "")]
    assert steps("_ -> z.$L", "a", "z.0 z.1 y") == [("", "z.0"), ("", "z.1")]
    assert steps("_ -> z.$L", "a") == []
    assert steps("_ -> z, optional", "a", "y") == []
