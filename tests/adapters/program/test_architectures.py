"""Models of transformers as programs: outputs and gradients beside the model, at the example sizes and at others."""

from __future__ import annotations

import pytest
import torch

from holdfast import Program, export_program, load_program
from tests.adapters.program.architectures import ARCHITECTURES

pytest.importorskip("transformers", reason="transformers is not installed: make setup")


def _tensors(outputs):
    return {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}


def _run(model, inputs):
    """Outputs, and gradients of every parameter by its key."""
    outputs = _tensors(model(**inputs))
    model.zero_grad()
    sum(value.float().square().mean() for value in outputs.values() if value.requires_grad).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return outputs, gradients


def _compare(model, module, inputs, exact):
    (expected, wanted), (found, own) = _run(model, inputs), _run(module, inputs)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0 if exact else 1e-6)
    assert wanted.keys() == own.keys()
    for name, gradient in wanted.items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 1e-6}
        torch.testing.assert_close(own[name], gradient, **tolerance, msg=name)


@pytest.mark.sliced(8)
@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_training_dialect_is_the_model(name):
    torch.manual_seed(0)
    model, example, other, sizes = ARCHITECTURES[name]()
    program = export_program(model, example, sizes)
    back = Program.from_json(program.to_json())
    assert back == program
    for node in program.walk():
        if not node.op.startswith(("size.", "aten.sym_size", "tuple.")):
            assert node.origin.line and node.origin.module in program.modules, node
    module = load_program(program, weights=model)
    _compare(model, module, example, exact=True)
    _compare(model, module, other, exact=False)
