"""`.fx()`: the program as a GraphModule, equal to the interpreter, as it is and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler

import holdfast
from tests.adapters.program.models import AUTO, EVERYTHING_SIZES, Decoder, Everything, everything_inputs


def test_the_graph_module_and_its_compiled_form_compute_what_the_program_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    batch = torch.export.Dim("batch", min=2)
    program = holdfast.export_program(model, (torch.randn(3, 4),), dynamic_shapes=({0: batch},))
    module = holdfast.load_program(program, weights=model)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        expected = model(x)
        assert torch.equal(module(x), expected)
        for graph in (module.fx(), torch.compile(module.fx(), backend="eager")):
            (out,) = graph(x)  # the leaves of the outputs
            assert torch.equal(out, expected)
    gradient = torch.autograd.grad(module.fx()(x)[0].square().sum(), list(module.parameters()))
    truth = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(gradient, truth, strict=True))


def _tensors(values):
    found = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else [values]
    return [value for value in found if isinstance(value, torch.Tensor)]


def _no_compiler() -> str:
    try:
        return "" if get_cpp_compiler() else "no C++ compiler"
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def _case(name):
    """Return a program and a model with its inputs at several sizes, the first those of the export."""
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=2)
    if name == "everything":
        args, kwargs = everything_inputs()
        model: nn.Module = Everything().eval()
        made = holdfast.export_program(model, args, EVERYTHING_SIZES, example_kwargs=kwargs)
        return made, model, [everything_inputs(*size) for size in ((2, 8), (3, 10), (5, 12))]
    if name == "mlp":
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        calls = [((torch.randn(count, 4),), {}) for count in (3, 5)]
        return holdfast.export_program(model, calls[0][0], ({0: rows},)), model, calls
    model = Decoder()
    calls = [((torch.randint(0, 64, size),), {}) for size in ((2, 8), (3, 12), (5, 7))]
    return holdfast.export_program(model, calls[0][0], ({0: rows, 1: AUTO},)), model, calls


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("decoder", "aot_eager"),
        ("everything", "aot_eager"),
        pytest.param("mlp", "inductor", marks=[pytest.mark.slow, pytest.mark.full]),
        pytest.param("decoder", "inductor", marks=pytest.mark.full),
        pytest.param("everything", "inductor", marks=pytest.mark.full),
    ],
)
def test_the_compiled_graph_module_has_the_outputs_and_gradients_of_the_model(name: str, backend: str) -> None:
    if backend == "inductor" and (reason := _no_compiler()):
        pytest.skip(f"Inductor needs a C++ compiler: {reason}")
    program, model, calls = _case(name)
    module = holdfast.load_program(program, weights=model)
    torch._dynamo.reset()
    compiled = torch.compile(module.fx(), backend=backend, dynamic=True, fullgraph=True)
    for args, kwargs in calls:
        truth = _tensors(model(*args, **kwargs))
        found = _tensors(compiled(*module.flat_inputs(args, kwargs)))
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
        expected = torch.autograd.grad(truth[0].square().mean(), list(model.parameters()))
        gradients = torch.autograd.grad(found[0].square().mean(), list(module.parameters()))
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
