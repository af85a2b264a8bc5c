"""`holdfast show` of an export of Paddle: its operators, and its program line by line."""

from __future__ import annotations

import json

from tests.cli.calls import call
from tests.sources.paddle.pir.exports import GOLDEN


def shown(*arguments: str) -> str:
    result = call("show", *arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_program_file_is_printed_line_by_line() -> None:
    output = shown(str(GOLDEN / "specials" / "model.json"))
    assert "program (paddle pir 3): 22 operators: 8 pd_op.full, 7 pd_op.fetch" in output
    assert "  %14 = pd_op.leaky_relu(%1, negative_slope=nan): float32[?, 3]\n" in output


def test_a_folder_has_the_operators_and_no_lines() -> None:
    output = shown(str(GOLDEN / "mlp"))
    assert "13 operators: 3 pd_op.matmul, 3 pd_op.add" in output
    assert "%8" not in output


def test_json() -> None:
    fields = json.loads(shown("--json", str(GOLDEN / "mlp")))
    assert fields["program"]["runs"] is True
    assert fields["program"]["refusal"] is None
    assert fields["program"]["operators"]["pd_op.matmul"] == 3
    assert "program" not in json.loads(shown("--json", str(GOLDEN.parent / "paddle" / "params_fp32")))
