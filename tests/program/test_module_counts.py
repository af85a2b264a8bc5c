"""Counts of a program: operators, parameters and FLOPs by module; composites."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from holdfast import export_program
from holdfast.program.module_counts import composites, least_sizes, nodes_of, summarize, total_of
from tests.adapters.program.models import AUTO, Cnn, Decoder, UNet
from tests.program.by_hand import program

CASES = {
    "cnn": (Cnn, (torch.randn(2, 3, 16, 16),)),
    "unet": (UNet, (torch.randn(2, 1, 16, 16), torch.rand(2))),
    "decoder": (Decoder, (torch.randint(0, 64, (2, 8)),)),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_and_parameters_are_those_that_torch_counts(name):
    kind, inputs = CASES[name]
    model = kind().eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    made = export_program(model, inputs)
    nodes, parameters, flops = total_of(summarize(made, least_sizes(made)), "")
    attention = 2 * 4 * 2 * 8 * 32 * 8 if name == "decoder" else 0  # torch does not count that of the CPU
    assert flops == counter.get_total_flops() + attention
    assert parameters == sum(tensor.numel() for tensor in model.state_dict().values())
    assert nodes == sum(1 for _ in made.walk())


def test_flops_grow_with_the_sizes_that_are_asked_for():
    model = nn.Linear(4, 3)
    made = export_program(model, (torch.ones(2, 4),), ({0: AUTO},))
    (name,) = made.symbols
    for rows in (1, 7):
        modules = summarize(made, least_sizes(made, {name: rows}))
        assert total_of(modules, "")[2] == 2 * rows * 4 * 3


def test_modules_count_what_is_theirs_and_what_is_inside():
    made = program()
    modules = summarize(made, least_sizes(made))
    assert [node.name for node in modules["fc"].nodes] == ["y"] and modules["fc"].parameters == 10
    assert modules["fc"].flops == 2 * 1 * 2 * 4 and modules["fc"].kind == "torch.nn.Linear"
    assert total_of(modules, "")[0] == 5 and total_of(modules, "fc")[0] == 1


def test_what_each_composite_became():
    made = export_program(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), (torch.ones(2, 4),), None, True)
    became = composites(made)
    (ways,) = became["aten.linear.default"].items()
    assert ways == (("aten.permute.default", "aten.addmm.default"), 2)
    assert [node.origin.module for node in nodes_of(made, "aten.addmm")] == ["0", "2"]
    assert nodes_of(made, "aten.add") == []
