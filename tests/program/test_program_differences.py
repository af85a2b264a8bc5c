"""Programs compared by structure."""

from __future__ import annotations

import dataclasses

from holdfast.program.arguments import Ref
from holdfast.program.graph import PARAMETER, StateEntry, TensorType
from holdfast.program.program_differences import compare_programs
from tests.program.by_hand import program


def _changes(other):
    return {(change.where, change.what) for change in compare_programs(program(), other)}


def test_equal_programs_have_no_differences():
    assert _changes(program()) == set()


def test_names_of_nodes_and_lines_do_not_count():
    made = program()
    renamed = {"y": "hidden", "z": "shifted"}
    nodes = tuple(
        dataclasses.replace(
            node,
            name=renamed.get(node.name, node.name),
            args=tuple(Ref(renamed.get(v.name, v.name)) if isinstance(v, Ref) else v for v in node.args),
            origin=dataclasses.replace(node.origin, line="other.py:9"),
        )
        for node in made.nodes
    )
    assert _changes(program(nodes=nodes, outputs=(Ref("shifted"), Ref("n0"), None)).check()) == set()


def test_changed_operators_are_found_in_their_module():
    made = program()
    first = dataclasses.replace(made.nodes[0], args=(Ref("x"), Ref("w")))
    (change,) = compare_programs(made, program(nodes=(first, *made.nodes[1:])))
    assert (change.where, change.what) == ("fc", "changed")
    assert "fc.weight, fc.bias" in change.first and "fc.bias" not in change.second
    removed = program(nodes=(made.nodes[0], *made.nodes[2:]), outputs=(Ref("y"), Ref("n0"), None))
    assert _changes(removed) == {("", "removed")}


def test_weights_sizes_modes_and_inputs():
    made = program()
    wide = StateEntry("b", PARAMETER, "fc.bias", TensorType("bfloat16", (2,)))
    assert _changes(program(state=(made.state[0], wide, *made.state[2:]))) == {("weights", "fc.bias")}
    assert _changes(program(symbols={"batch": (1, 65)})) == {("symbols", "batch")}
    assert _changes(program(training=True, guards=())) == {("program", "training"), ("program", "guards")}
    inputs = (dataclasses.replace(made.inputs[0], type=TensorType("float64", ("batch", 4))),)
    assert _changes(program(inputs=inputs)) == {("inputs", "x")}
