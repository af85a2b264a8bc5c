"""The table of operators: what it must not have, and what it must."""

from __future__ import annotations

import pytest
import torch

from holdfast.program.operator_table import allowed_overloads, is_allowed
from tests.program.make_operators import overloads, table

NEVER = """
    aten.from_file.default aten.set_.source_Tensor aten.set_.source_Storage aten.set_.default aten.set_data.default
    aten.resize_.default aten.resize_as_.default aten.empty.memory_format aten.empty_like.default aten.new_empty.default
    aten.empty_strided.default aten.linear.out aten.add.out aten.data.default aten.requires_grad_.default
    aten.record_stream.default aten._sparse_coo_tensor_unsafe.default aten.as_strided_.default aten.save.default
    aten.manual_seed.default aten.quantize_per_tensor.default aten._cudnn_rnn.default aten.warn.default
    aten.retain_grad.default aten.backward.default aten._make_dual.default aten.pin_memory.default aten.linear
    torch.os.system prim.Print.default aten.linear.default.__class__ aten.__class__.default
""".split()


@pytest.mark.parametrize("op", NEVER)
def test_operators_that_a_program_never_calls(op):
    assert not is_allowed(op)


def test_the_table_is_what_the_rule_says_of_this_torch():
    known = {op.removeprefix("aten.") for op in allowed_overloads()}
    assert table() <= known, "run python -m tests.program.make_operators"
    assert not (known - table()) & overloads().keys(), "the table has operators that the rule refuses"


def test_the_table_has_every_core_operator_but_those_of_gradients_and_memory():
    left = {
        name
        for name, op in overloads().items()
        if torch.Tag.core in op.tags
        and not is_allowed(f"aten.{name}")
        and not name.endswith((".out", "backward.default"))
    }
    assert left == {"resize_.default", "empty_strided.default", "empty.memory_format", "sym_is_contiguous.default"}
