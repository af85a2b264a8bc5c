"""A program as lines of text."""

from __future__ import annotations

from holdfast.sources.paddle.pir.pir_program import OpaqueAttribute, OpaqueType, PirOperator, PirProgram, PirResult
from holdfast.sources.paddle.pir.pir_text import attribute_text, program_lines, type_text
from tests.sources.paddle.pir.exports import GOLDEN, source_program


def test_lines_of_weights_and_operators() -> None:
    lines = list(program_lines(source_program(GOLDEN / "mlp" / "model.json").plain))
    assert lines[0] == "%1 = linear_2.b_0: float32[4]"
    assert lines[7] == "%8 = pd_op.matmul(%7, %6, transpose_x=False, transpose_y=False): float32[?, 16]"
    assert "pd_op.dropout(%13, none, %14, is_test=True" in "\n".join(lines)


def test_special_numbers_are_shown() -> None:
    text = "\n".join(program_lines(source_program(GOLDEN / "specials" / "model.json").plain))
    assert "negative_slope=nan" in text
    assert "value=-inf" in text


def test_inner_operators_and_other_types() -> None:
    inner = PirOperator("cf.yield", (), ())
    outer = PirOperator("pd_op.if", (3,), (PirResult(4, OpaqueType("array")),), inner=(inner,), regions=1)
    program = PirProgram(3, True, (), (outer,))
    assert list(program_lines(program)) == ["%4 = pd_op.if(%3): array", "  cf.yield()"]
    assert type_text((None, OpaqueType("x"))) == "(none, x)"
    assert attribute_text(OpaqueAttribute("strange")) == "<strange>"
    assert attribute_text(tuple(range(20))).endswith("11, ... 20 in all]")
