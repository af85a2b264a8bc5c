"""Programs as plain data: to JSON and back, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast import Damaged, Program
from holdfast.program.arguments import Ref
from tests.program.by_hand import program


def test_a_program_comes_back_from_its_json():
    made = program()
    back = Program.from_json(made.to_json())
    assert back == made and hash(back) == hash(made)
    assert back.nodes[1].kwargs == {"alpha": 2} and back.state[0].aliases == ("head.weight",)
    assert back.output_structure.was == "lib.Output" and back.symbols == {"batch": (1, 64)}
    assert back.to_json() == made.to_json()


def test_the_nodes_inside_of_blocks_are_walked_after_the_node_around_them():
    assert [node.name for node in program().walk()] == ["y", "z", "n", "full", "n0"]
    assert program().keys() == ["fc.weight", "fc.bias", "last"]


def test_programs_that_differ_are_not_equal():
    made = program()
    assert made != program(training=True)
    assert made != program(symbols={"batch": (1, 65)})
    assert made != made.to_json()


def test_check_refuses_what_a_reader_would_refuse():
    assert program().check() == program()
    with pytest.raises(Damaged, match="'nowhere' is not defined before its use"):
        program(outputs=(Ref("nowhere"), None, None)).check()


def test_a_program_is_read_without_torch(tmp_path):
    path = tmp_path / "program.json"
    path.write_bytes(program().to_json())
    code = (
        f"import sys, holdfast; print(holdfast.Program.from_json(open({str(path)!r}, 'rb').read()))\n"
        "assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown == "<Program of 5 nodes, 4 weights, 1 inputs; training>\n"
