"""Programs of the real Paddle run with its outputs; what has no counterpart is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.errors import Mismatch, Unsupported
from holdfast.program.graph import BUFFER, PARAMETER, TensorType
from holdfast.sources.paddle.pir.pir_rules import RULES
from tests.sources.paddle.pir.exports import (
    GOLDEN,
    MODELS,
    TOLERANCE,
    difference,
    edited,
    opened,
    operators_named,
    runs,
    source_program,
    translated,
    unpack,
)


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exports of single operators and layers."""
    return unpack(tmp_path_factory.mktemp("operators"))


@pytest.mark.parametrize("suffix", ["", "_other"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_outputs_that_paddle_computed(name: str, suffix: str) -> None:
    assert difference(GOLDEN / name, suffix) <= TOLERANCE


def test_every_operator_has_the_outputs_that_paddle_computed(operators: Path) -> None:
    apart = {folder.name: difference(folder) for folder in sorted(operators.iterdir())}
    assert len(apart) > 190
    assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}


def test_every_rule_is_used_by_an_export(operators: Path) -> None:
    """A rule that was never compared with Paddle is none."""
    folders = [*operators.iterdir(), *(GOLDEN / name for name in MODELS)]
    used = {name for folder in folders for name in source_program(folder / "model.json").operators}
    assert sorted(set(RULES) - used) == []


def test_weights_and_gradients() -> None:
    module, inputs, _ = runs(GOLDEN / "cnn")
    kinds = {entry.key: entry.kind for entry in module.program.state}
    assert kinds["conv2d_0.w_0"] == PARAMETER
    assert kinds["batch_norm2d_0.w_1"] == BUFFER
    module(*inputs).square().sum().backward()
    assert set(dict(module.named_parameters())) == {key for key, kind in kinds.items() if kind == PARAMETER}
    assert all(
        parameter.grad.abs().sum() > 0 for name, parameter in module.named_parameters() if "conv2d_0.b" not in name
    )


def test_other_weights_change_the_outputs() -> None:
    module, inputs, _ = runs(GOLDEN / "mlp")
    weights = {key: value * 2 for key, value in module.state_dict().items()}
    other = holdfast.load_program(GOLDEN / "mlp" / "model.json", weights=weights)
    x = inputs[0]
    for index in range(3):
        x = x @ weights[f"linear_{index}.w_0"] + weights[f"linear_{index}.b_0"]
        x = torch.nn.functional.gelu(x) if index == 0 else x.relu() if index == 1 else x.softmax(-1)
    torch.testing.assert_close(other(*inputs), x)


def test_sizes_that_may_differ_are_symbols_and_others_are_checked() -> None:
    module, _, _ = runs(GOLDEN / "block")
    assert set(module.program.symbols) == {"x_0", "x_1"}
    with pytest.raises(Mismatch, match=r"x is float32, but the program was exported for int64"):
        module(torch.zeros(2, 3))
    mlp, _, _ = runs(GOLDEN / "mlp")
    with pytest.raises(Mismatch, match="dim 1 of x is 9, but it was 8"):
        mlp(torch.zeros(2, 9))


def test_nodes_say_where_they_come_from() -> None:
    program = translated(GOLDEN / "encoder" / "model.json")
    assert all(node.origin.call.startswith(("pd_op.", "builtin.")) for node in program.nodes)
    assert program.modules["TransformerEncoderLayer.MultiHeadAttention.Linear_1"] == "Linear"
    cnn = translated(GOLDEN / "cnn" / "model.json")
    convolutions = [node.type for node in cnn.nodes if node.op == "aten.conv2d.default"]
    assert convolutions == [TensorType("float32", ("x_0", 8, 8, 8)), TensorType("float32", ("x_0", 8, 4, 4))]


def test_the_program_survives_its_own_json() -> None:
    for name in MODELS:
        program = translated(GOLDEN / name / "model.json")
        assert holdfast.Program.from_json(program.to_json()) == program


def rename(name: str, other: str) -> Any:
    return lambda operators: [operator.update({"#": other}) for operator in operators_named(operators, name)]


def test_an_unknown_operator_is_refused_by_name_and_the_rest_is_readable(tmp_path: Path) -> None:
    path = edited(GOLDEN / "mlp", tmp_path, rename("1.gelu", "3.my_gelu"))
    checkpoint, source = opened(path), source_program(path)
    assert checkpoint.read("linear_0.w_0").shape == (8, 16)
    assert source.operators["custom_op.my_gelu"] == 1
    assert any(operator.name == "custom_op.my_gelu" for operator in source.plain.operators)
    assert any("no aten counterpart is known for custom_op.my_gelu" in note for note in checkpoint.notes)
    with pytest.raises(Unsupported, match=r"no aten counterpart is known for custom_op\.my_gelu: the program can be"):
        _ = checkpoint.program
    with pytest.raises(Unsupported, match=r"custom_op\.my_gelu"):
        holdfast.load_program(path)


@pytest.mark.parametrize(
    ("name", "operator", "attribute", "value", "message"),
    [
        ("cnn", "1.batch_norm_", "is_test", False, r"pd_op\.batch_norm_: training mode"),
        ("mlp", "1.dropout", "is_test", False, r"pd_op\.dropout: training mode"),
        ("mlp", "1.dropout", "mode", "mine", r"pd_op\.dropout: mode='mine'"),
        ("cnn", "1.conv2d", "data_format", "WHCN", r"pd_op\.conv2d: the data format 'WHCN'"),
        ("cnn", "1.pool2d", "pooling_type", "lp", r"pd_op\.pool2d: pooling_type='lp'"),
        ("mlp", "1.softmax", "axis", 7, r"pd_op\.softmax: the axis 7 of 2 dims"),
        ("mlp", "1.matmul", "transpose_x", "yes", r"the attribute 'transpose_x' is not bool"),
    ],
)
def test_a_use_without_a_counterpart_is_refused(
    tmp_path: Path, name: str, operator: str, attribute: str, value: Any, message: str
) -> None:
    def edit(operators: list[dict[str, Any]]) -> None:
        for found in operators_named(operators, operator):
            for item in found["A"]:
                if item["N"] == attribute:
                    kind = {bool: "0.a_bool", int: "0.a_i32", str: "0.a_str"}[type(value)]
                    item["AT"] = {"#": kind, "D": value}
                elif item["N"] == "use_global_stats":
                    item["AT"]["D"] = False

    path = edited(GOLDEN / name, tmp_path, edit)
    with pytest.raises(Unsupported, match=message):
        holdfast.load_program(path)


def test_an_attribute_that_the_rule_does_not_know_is_refused(tmp_path: Path) -> None:
    def edit(operators: list[dict[str, Any]]) -> None:
        operators_named(operators, "1.relu")[0]["A"].append({"N": "upside_down", "AT": {"#": "0.a_bool", "D": True}})

    with pytest.raises(Unsupported, match=r"pd_op\.relu: the unknown attribute 'upside_down'"):
        holdfast.load_program(edited(GOLDEN / "mlp", tmp_path, edit))


def test_a_number_saved_as_null_is_refused(tmp_path: Path) -> None:
    def edit(operators: list[dict[str, Any]]) -> None:
        for item in operators_named(operators, "1.leaky_relu")[0]["A"]:
            item["AT"] = {"#": "0.a_f32", "D": None}

    path = edited(GOLDEN / "specials", tmp_path, edit)
    with pytest.raises(Unsupported, match=r"negative_slope' is a number that was saved as null: NaN or infinite"):
        holdfast.load_program(path)


def test_a_result_that_is_not_translated_is_refused(tmp_path: Path) -> None:
    def edit(operators: list[dict[str, Any]]) -> None:
        statistics = operators_named(operators, "1.batch_norm_")[0]["O"][1]["%"]
        operators_named(operators, "1.fetch")[0]["I"] = [{"%": statistics}]

    with pytest.raises(Unsupported, match=r"pd_op\.batch_norm_: its result 2 is used"):
        holdfast.load_program(edited(GOLDEN / "cnn", tmp_path, edit))


def test_control_flow_is_refused_by_name(tmp_path: Path) -> None:
    def edit(operators: list[dict[str, Any]]) -> None:
        inner = dict(operators_named(operators, "1.relu")[0], O=[])
        block = {"#": "block_1", "args": [], "ops": [inner]}
        operators.insert(
            -1, {"#": "1.if", "A": [], "I": [], "O": [], "regions": [{"#": "region_1", "blocks": [block]}]}
        )

    with pytest.raises(Unsupported, match=r"no aten counterpart is known for pd_op\.if"):
        holdfast.load_program(edited(GOLDEN / "mlp", tmp_path, edit))
