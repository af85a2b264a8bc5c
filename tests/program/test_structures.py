"""Structures of inputs and outputs."""

from __future__ import annotations

import pytest

from holdfast.program.structures import (
    NamedOutputs,
    Structure,
    StructureProblem,
    decode_structure,
    encode_structure,
    flatten,
    unflatten,
)

LEAF = Structure()
NESTED = Structure(
    "tuple", (LEAF, Structure("dict", (LEAF, Structure("none")), ("a", "b")), Structure("list", (LEAF,)))
)


def test_a_value_is_flattened_and_put_together():
    value = (1, {"b": None, "a": 2}, [3])
    leaves = list(flatten(value, NESTED))
    assert leaves == [1, 2, 3] and NESTED.leaves == 3
    assert unflatten(leaves, NESTED) == (1, {"a": 2, "b": None}, [3])
    assert decode_structure(encode_structure(NESTED), ValueError) == NESTED


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, {"a": 2, "b": None}), "has 3 items in the program, and 2 here"),
        ([1, {"a": 2, "b": None}, [3]], "is a tuple in the program, and list here"),
        ((1, {"a": 2}, [3]), "missing: b"),
        ((1, {"a": 2, "b": None, "c": 1}, [3]), "unexpected: c"),
        ((1, {"a": 2, "b": 5}, [3]), "is None in the program, and int here"),
    ],
)
def test_another_structure_is_refused_by_its_place(value, message):
    with pytest.raises(StructureProblem, match=message):
        list(flatten(value, NESTED))


def test_outputs_of_a_class_are_read_by_attribute():
    outputs = unflatten([1, 2], Structure("dict", (LEAF, LEAF), ("logits", "loss"), "lib.Output"))
    assert isinstance(outputs, NamedOutputs) and outputs.logits == 1 and outputs["loss"] == 2
    with pytest.raises(AttributeError, match="no output 'cache'; it has logits, loss"):
        _ = outputs.cache


@pytest.mark.parametrize(
    "data",
    [
        *("x", 1, {}, {"set": []}, {"tuple": 1}, {"dict": ["*"], "keys": []}, {"dict": ["*", "*"], "keys": ["a", "a"]}),
        *(
            {"tuple": [], "keys": []},
            {"list": ["*"], "was": 3},
            {"list": ["*"], "then": "x"},
            {"dict": ["*"], "keys": [1]},
        ),
    ],
    ids=str,
)
def test_other_data_is_refused(data):
    with pytest.raises(ValueError):
        decode_structure(data, ValueError)


def test_deep_structures_are_refused():
    deep: object = "*"
    for _ in range(40):
        deep = {"list": [deep]}
    with pytest.raises(ValueError, match="deeper"):
        decode_structure(deep, ValueError)
