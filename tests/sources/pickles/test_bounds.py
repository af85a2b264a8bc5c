"""Values that cannot be walked to an end are refused."""

from __future__ import annotations

import pytest

from holdfast.core.errors import Damaged
from holdfast.sources.pickles import bounds
from holdfast.sources.pickles.bounds import DEPTH, check_traversal
from holdfast.sources.pickles.values import Name, Record


def nested(depth: int, make=lambda inner: [inner]):
    value = make(0)
    for _ in range(depth - 1):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda i: [i], lambda i: (i,), lambda i: {"k": i}, lambda i: [0, {"k": (i,)}]])
def test_depth_has_a_limit(make):
    step = 3 if isinstance(make(0), list) and len(make(0)) == 2 else 1
    check_traversal(nested(DEPTH // step - 1, make), 0, "test")
    with pytest.raises(Damaged, match="nested deeper"):
        check_traversal(nested(DEPTH + 1, make), 0, "test")


def test_a_shared_branch_counts_with_all_its_depth():
    low = nested(DEPTH - 10)
    with pytest.raises(Damaged, match="nested deeper"):
        check_traversal([low, nested(20, lambda i: [i] if i else [low])], 0, "test")


def test_a_record_that_holds_itself():
    record = Record(Name("a", "b"))
    record.state = {"self": record}
    with pytest.raises(Damaged, match="contains itself"):
        check_traversal([record], 0, "test")


def test_shared_values_are_counted_as_often_as_they_are_seen():
    value: list[object] = [0]
    for _ in range(30):
        value = [value, value]
    with pytest.raises(Damaged, match="repeats shared values"):
        check_traversal(value, 100, "test")
    check_traversal([[1] * 10] * 1000, 100, "test")


def test_what_is_no_container_is_no_visit(monkeypatch):
    monkeypatch.setattr(bounds, "_ALWAYS", 0)
    check_traversal("text", 0, "test")
    with pytest.raises(Damaged, match="repeats shared values"):
        check_traversal({1: {2, 3}, "a": frozenset()}, 0, "test")
    check_traversal({1: {2, 3}, "a": frozenset()}, 1, "test")
