"""`.fx()`: the program as a GraphModule, equal to the interpreter, as it is and under torch.compile."""

from __future__ import annotations

import torch
from torch import nn

import holdfast


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
