"""Sizes and guards: evaluated as trees, solved for a symbol, limited."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.program.sizes import (
    SizeOperation,
    SizeProblem,
    decode_size,
    encode_size,
    evaluate,
    is_condition,
    size_text,
    solve,
    symbols_of,
)

NUMBERS = st.integers(-1000, 1000)
TREES = st.recursive(
    NUMBERS | st.sampled_from(["s", "t"]),
    lambda inner: st.builds(SizeOperation, st.sampled_from(["add", "mul"]), st.tuples(inner, inner)),
    max_leaves=8,
)


def _plain(size, values):
    if isinstance(size, SizeOperation):
        terms = [_plain(term, values) for term in size.terms]
        return {"add": operator.add, "mul": operator.mul}[size.name](*terms)
    return values.get(size, size)


@given(TREES, NUMBERS, NUMBERS)
def test_a_tree_is_worth_what_python_computes(size, s, t):
    values = {"s": s, "t": t}
    expected = _plain(size, values)
    back = decode_size(encode_size(size), ValueError)
    assert back == size
    if abs(expected) < 2**62:
        assert evaluate(back, values) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (["floordiv", 7, 2], 3),
        (["mod", -7, 3], 2),
        (["pow", 3, 4], 81),
        (["min", 4, 2, 9], 2),
        (["max", "s", 2], 10),
        (["sub", "s", 3], 7),
        (["where", ["gt", "s", 9], 1, 2], 1),
        (["eq", ["mod", "s", 2], 0], 1),
        (["and", ["lt", "s", 3], ["ge", "s", 0]], 0),
        (["or", ["lt", "s", 3], ["ne", "s", 0]], 1),
        (["not", ["le", "s", 3]], 1),
    ],
)
def test_operations(data, expected):
    assert evaluate(decode_size(data, ValueError), {"s": 10}) == expected


@pytest.mark.parametrize("data", [["floordiv", "s", 0], ["pow", 2, 65], ["mul", 2**62, 4], "unknown", ["mod", 1, 0]])
def test_a_size_without_a_value_says_so(data):
    with pytest.raises(SizeProblem):
        evaluate(decode_size(data, ValueError), {"s": 10})


@pytest.mark.parametrize(
    "data",
    [
        ["eval", "1"],
        ["add", 1],
        ["not", 1, 2],
        [],
        [["add"], 1, 2],
        1.5,
        None,
        {"a": 1},
        2**63,
        True,
        ["add", *range(1001)],
    ],
    ids=lambda data: str(data)[:20],
)
def test_other_data_is_refused(data):
    with pytest.raises(ValueError):
        decode_size(data, ValueError)


def test_deep_sizes_are_refused():
    deep: object = "s"
    for _ in range(40):
        deep = ["add", deep, 1]
    with pytest.raises(ValueError, match="levels"):
        decode_size(deep, ValueError)


def test_a_linear_size_is_solved():
    size = decode_size(["add", ["mul", 3, "s"], 1], ValueError)
    assert solve(size, 16, {}) == ("s", 5)
    assert solve(size, 17, {}) is None
    assert solve(decode_size(["mul", "s", "s"], ValueError), 16, {}) is None
    assert solve(decode_size(["mul", "s", "t"], ValueError), 12, {"t": 4}) == ("s", 3)


def test_sizes_are_written_as_people_write_them():
    guard = decode_size(["eq", ["mod", "s", 2], 0], ValueError)
    assert size_text(guard) == "(s % 2) == 0" and is_condition(guard) and list(symbols_of(guard)) == ["s"]
    assert size_text(decode_size(["max", "s", 1], ValueError)) == "max(s, 1)"
