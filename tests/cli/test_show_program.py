"""`holdfast show --program` and `holdfast diff` of programs."""

import json
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import holdfast
from tests.cli.calls import call


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    torch.manual_seed(0)
    models = {"relu": nn.Sequential(nn.Linear(4, 3), nn.ReLU()), "gelu": nn.Sequential(nn.Linear(4, 3), nn.GELU())}
    models["gelu"].load_state_dict(models["relu"].state_dict())
    for name, model in models.items():
        for decompose in (False, True):
            rows = torch.export.Dim("rows", max=64)
            program = holdfast.export_program(model, (torch.ones(2, 4),), ({0: rows},), decompose)
            holdfast.save(folder / f"{name}{'-core' if decompose else ''}", {"model": model}, step=1, program=program)
    holdfast.save(folder / "none", {"model": models["relu"]}, step=1)
    return folder


def test_a_program_is_shown_by_module_with_counts(steps):
    lines = call("show", steps / "relu", "--program").output.splitlines()
    assert lines[0] == "2 operators, 15 parameters, 24 FLOPs at rows=1"
    assert lines[1].startswith("dialect training, exported in training mode by holdfast ")
    assert "input input: float32[rows, 4]" in lines and "size rows: 0 to 64" in lines
    assert "0  torch.nn.modules.linear.Linear  1 operator, 15 parameters, 24 FLOPs in all" in lines
    assert any(line.startswith("  linear = aten.linear.default  float32[rows, 3]  torch/nn/modules/") for line in lines)
    assert "       1  aten.relu.default" in lines
    assert "60 FLOPs" not in lines[0]
    assert "120 FLOPs at rows=5" in call("show", steps / "relu", "--program", "--size", "rows=5").output


def test_what_each_composite_became_and_the_way_back(steps):
    shown = call("show", steps / "relu-core", "--program").output
    assert "aten.linear.default -> aten.permute.default, aten.addmm.default" in shown
    back = call("show", steps / "relu-core", "--program", "--origin", "aten.addmm").output
    assert back.startswith("addmm: 0  ") and back.strip().endswith("of aten.linear.default (linear)")
    found = json.loads(call("show", steps / "relu-core", "--program", "--origin", "aten.addmm", "--json").output)
    assert found[0]["composite"] == {"name": "linear", "op": "aten.linear.default"} and found[0]["module"] == "0"


def test_json(steps):
    found = json.loads(call("show", steps / "relu", "--program", "--json").output)
    assert (found["nodes"], found["parameters"], found["flops"], found["sizes"]) == (2, 15, 24, {"rows": 1})
    assert found["modules"]["0"]["operators"] == {"aten.linear.default": 1}


def test_svg(steps, tmp_path):
    assert call("show", steps / "relu", "--program", "--svg", tmp_path / "graph.svg").exit_code == 0
    ElementTree.parse(tmp_path / "graph.svg")
    assert call("show", steps / "relu", "--program", "--svg", tmp_path / "no" / "graph.svg").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "--program"], "has no program; holdfast.add_program"),
        (["relu", "--origin", "aten.addmm"], "add --program"),
        (["relu", "--program", "--origin", "aten.addmm"], "no node calls 'aten.addmm'"),
        (["relu", "--program", "--size", "columns=3"], "the sizes of this program that may differ: rows"),
    ],
)
def test_wrong_calls(steps, arguments, message):
    done = call("show", steps / arguments[0], *arguments[1:])
    assert done.exit_code == 1 and message in str(done.exception)


def test_diff_says_which_operator_changed_where(steps):
    done = call("diff", steps / "relu", steps / "gelu")
    assert done.exit_code == 1
    assert "program: 1: changed: aten.relu.default(_)" in done.output and "against aten.gelu.default(_)" in done.output
    found = json.loads(call("diff", steps / "relu", steps / "gelu", "--json").output)
    assert not found["same"] and found["differences"] == [] and found["program"][0]["where"] == "1"
    assert call("diff", steps / "relu", steps / "relu").exit_code == 0
    missing = call("diff", steps / "relu", steps / "none")
    assert missing.exit_code == 1 and "program: program: only in one: here against missing" in missing.output
