"""Reading program.json: everything that no Holdfast writes is refused, with its place."""

from __future__ import annotations

import json

import pytest

from holdfast import Damaged, Program, Unsupported
from holdfast.program.encode import VERSION
from tests.program.by_hand import fields, program, read

NEWER = [VERSION[0], VERSION[1] + 1]


def test_another_file_is_not_a_program():
    with pytest.raises(Damaged, match="not a Holdfast program"):
        Program.from_json(b'{"format":"holdfast"}')
    with pytest.raises(Damaged, match="not valid JSON"):
        Program.from_json(b"{")
    with pytest.raises(Damaged, match="NaN is not JSON"):
        Program.from_json(json.dumps(fields(guards=[float("nan")])).encode())


def test_a_newer_major_version_is_refused_and_says_what_to_do():
    with pytest.raises(Unsupported, match=r"version 2\.0, but this Holdfast reads only up to 1\.x: install a newer"):
        read(fields(version=[2, 0]))
    with pytest.raises(Damaged, match="version 0 never existed"):
        read(fields(version=[0, 9]))


def test_unknown_fields_are_damage_now_and_ignored_in_a_newer_minor_version():
    with pytest.raises(Damaged, match="unknown field 'notes'"):
        read(fields(notes=1))
    assert read(fields(notes=1, version=NEWER)).inputs == program().inputs


def test_what_a_newer_minor_version_added_is_refused_as_such():
    data = fields(version=NEWER)
    data["nodes"][0]["args"][0] = {"$newer": "x"}
    with pytest.raises(Unsupported, match=rf"program of version 1\.{NEWER[1]}: install a newer Holdfast"):
        read(data)


def _node(**changes):
    data = fields()
    data["nodes"][0] |= changes
    return data


def _missing(name):
    data = fields()
    del data[name]
    return data


DAMAGED = {
    "a field is missing": (_missing("nodes"), "a field is missing or invalid: KeyError: 'nodes'"),
    "dialect": (fields(dialect="any"), "the unknown dialect 'any'"),
    "training": (fields(training=1), "neither true nor false"),
    "defined twice": (_node(name="x"), "'x' is defined twice"),
    "two weights of a name": (
        fields(state=[fields()["state"][0], {**fields()["state"][1], "name": "w"}]),
        "defined twice",
    ),
    "two weights of a key": (
        fields(state=[fields()["state"][0], {**fields()["state"][1], "key": "head.weight"}]),
        "two weights",
    ),
    "used before it is defined": (_node(args=[{"$": "z"}, {"$": "w"}]), "'z' is not defined before its use"),
    "a value of a block seen outside": (fields(outputs=[{"$": "full"}, None, None]), "'full' is not defined"),
    "a name that is code": (_node(name="__import__('os')"), "is not a name"),
    "a long name": (_node(name="a" * 257), "is not a name"),
    "a schema that is missing": (fields(operators={}), "whose schema is not among the operators"),
    "a block where none is": (_node(block={"inputs": [], "nodes": [], "outputs": []}), "with a block"),
    "arguments of an operation": (_node(op="tuple.item", args=[{"$": "x"}]), "tuple.item takes a value of several"),
    "arguments of a size": (_node(op="size.add", args=[1]), "size.add takes 2 arguments, not 1"),
    "texts in a size": (_node(op="size.add", args=[1, "a"]), "size.add takes numbers"),
    "arguments by name of a size": (_node(op="size.add", args=[1, 2], kwargs={"a": 1}), "keyword arguments"),
    "a symbol": (_node(**{"is": ["float32", ["other"]]}), "unknown symbol 'other'"),
    "a dtype": (_node(**{"is": ["object", []]}), "unknown dtype 'object'"),
    "a negative size": (_node(**{"is": ["float32", [-1]]}), "a negative size"),
    "a rank": (_node(**{"is": ["float32", [1] * 65]}), "not a list of at most 64"),
    "a guard that is a number": (fields(guards=[["add", "batch", 1]]), "a guard that is not a condition"),
    "bounds": (fields(symbols={"batch": ["1", None]}), "are not two numbers"),
    "fewer inputs": (fields(inputs=[]), "not defined"),
    "fewer outputs": (fields(outputs=[{"$": "z"}]), "1 outputs, but their structure has 3"),
    "a mutation of nothing": (fields(mutations=[["y", {"$": "z"}]]), "one of them is unknown"),
    "a mutation by a number": (fields(mutations=[["last", 1]]), "not one of a node"),
    "a kind of weight": (fields(state=[{**fields()["state"][0], "kind": "code"}]), "unknown kind 'code'"),
    "a frozen buffer": (fields(state=[*fields()["state"][:2], {**fields()["state"][2], "frozen": True}]), "`frozen`"),
    "frozen by a number": (fields(state=[{**fields()["state"][0], "frozen": 1}]), "`frozen` is neither true nor false"),
    "a key": (fields(state=[{**fields()["state"][0], "key": "a\nb"}]), "has control characters"),
    "a weight of unknown shape": (
        fields(state=[{**fields()["state"][0], "is": ["float32", ["batch"]]}]),
        "fixed shape",
    ),
    "specialized": (fields(specialized=[["y", 0, 1]]), "not an input"),
    "an input without type": (fields(inputs=[{"name": "x", "is": None}]), "not a tensor and not a number"),
    "nodes are not a list": (fields(nodes={"a": 1}), "not a list"),
    "a node is a text": (fields(nodes=["x"]), "TypeError"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_programs_are_refused(name):
    data, message = DAMAGED[name]
    with pytest.raises(Damaged, match=message):
        read(data)


REFUSED = r"outside of the operators|an unknown operation|not a text"


@pytest.mark.parametrize(
    "op", ["aten.from_file.default", "torch.os.system", "aten.linear", "prim.eval.x", "block.exec", "", 3]
)
def test_operators_outside_of_the_table_are_refused(op):
    with pytest.raises((Unsupported, Damaged), match=REFUSED):
        read(_node(op=op))
    with pytest.raises((Unsupported, Damaged), match=REFUSED):
        read(fields(operators={**fields()["operators"], str(op): "aten::x() -> Tensor"}))


def test_blocks_in_blocks_are_limited():
    node = {"name": "b", "op": "block.set_grad", "args": [True], "is": None}
    inner: dict = {"inputs": [], "nodes": [], "outputs": []}
    for _ in range(10):
        inner = {"inputs": [], "nodes": [{**node, "block": inner}], "outputs": []}
    with pytest.raises(Damaged, match="blocks nested deeper than 8"):
        read(fields(nodes=[*fields()["nodes"], {**node, "block": inner}]))


def test_the_number_of_nodes_and_bytes_is_limited(monkeypatch):
    monkeypatch.setattr("holdfast.program.program_limits.NODES", 4)
    with pytest.raises(Damaged, match="more than 4 nodes"):
        read(fields())
    monkeypatch.setattr("holdfast.program.program_limits.PROGRAM_BYTES", 100)
    with pytest.raises(Damaged, match="more than the limit of 100"):
        read(fields())
