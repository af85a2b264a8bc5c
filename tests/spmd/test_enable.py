"""Turning the rules on, off, and choosing among them."""

from __future__ import annotations

import functools
import importlib
import re
import types

import pytest
import torch
from torch.distributed.tensor import DTensor

import holdfast.spmd
from holdfast.spmd.base import torch_dispatch, torch_versions
from holdfast.spmd.base.private_names import NAMES, RULES, PrivateName
from holdfast.spmd.base.registry import all_rules
from holdfast.spmd.base.spmd_errors import SpmdWarning
from holdfast.spmd.patches.methods import replacements


def _state():
    dispatcher = torch_dispatch.dispatcher()
    functions = [getattr(stand.owner, stand.name) for stand in replacements()]
    functions += [torch.nn.functional.pad, torch.nn.functional.instance_norm]
    functions += [torch_versions.utils.is_tensor_shardable, torch_versions._matrix_ops.is_tensor_shardable]
    losses = dict(torch_dispatch.loss_parallel_table())
    return dict(vars(dispatcher)), dict(dispatcher._custom_op_handlers), dict(vars(DTensor)), functions, losses


def test_disable_restores_torch_exactly():
    before = _state()
    holdfast.spmd.enable()
    assert _state() != before
    holdfast.spmd.disable()
    assert _state() == before


def test_enable_twice_is_enable_once():
    before = _state()
    holdfast.spmd.enable()
    holdfast.spmd.enable()
    holdfast.spmd.disable()
    assert _state() == before


def test_only_and_exclude_choose_by_family_and_operator():
    try:
        holdfast.spmd.enable(only=["loss"], exclude=["mse_loss.default"])
        installed = {line.operator: line.family for line in holdfast.spmd.report() if line.is_installed}
        assert set(installed.values()) == {"loss", "loss_parallel"}
        assert not [name for name in installed if "mse_loss" in name]
        assert {"aten.huber_loss.default", "aten.huber_loss_backward.default"} <= installed.keys()
    finally:
        holdfast.spmd.disable()


@pytest.mark.parametrize("name", ["mse_loss", "aten.mse_loss.default", "mse_loss.*"])
def test_an_operator_goes_by_each_of_its_names(name):
    try:
        assert holdfast.spmd.enable(only=[name]) == []
        installed = [line.operator for line in holdfast.spmd.report() if line.is_installed]
        assert installed == ["aten.mse_loss.default", "aten.mse_loss_backward.default"]
    finally:
        holdfast.spmd.disable()


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        ("embedding", "embedding_dense_backward"),
        ("nll_loss", "nll_loss_backward"),
        ("_softmax", "_softmax_backward_data"),
        ("native_layer_norm", "native_layer_norm_backward"),
        ("convolution", "convolution_backward"),
    ],
)
def test_an_operator_is_never_chosen_without_its_gradient(name: str, gradient: str) -> None:
    try:
        holdfast.spmd.enable(only=[name])
        assert f"aten.{gradient}.default" in {line.operator for line in holdfast.spmd.report() if line.is_installed}
        holdfast.spmd.enable(exclude=[name])
        installed = {line.operator for line in holdfast.spmd.report() if line.is_installed}
        assert not installed & {f"aten.{gradient}.default", f"aten.{name}.default", f"aten.{name}_forward.default"}
    finally:
        holdfast.spmd.disable()


def test_what_was_not_chosen_is_in_the_report_and_not_among_the_problems() -> None:
    try:
        assert holdfast.spmd.enable(only=["loss"], exclude=["mse_loss"]) == []
        off = {line.operator: line for line in holdfast.spmd.report() if not line.is_installed}
        assert off["aten.mse_loss.default"].family == "loss"
        assert {"fallback", "methods", "functions", "plain"} <= off.keys()
        assert {line.why for line in off.values()} == {"not chosen"}
    finally:
        holdfast.spmd.disable()


def test_the_report_says_what_and_why():
    try:
        holdfast.spmd.enable()
        lines = [line for line in holdfast.spmd.report() if line.is_installed]
        assert len(lines) > 150
        assert all(line.why and line.placements and line.family for line in lines)
    finally:
        holdfast.spmd.disable()


def test_an_unknown_torch_is_said_and_left_alone(monkeypatch):
    before = _state()
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    with pytest.warns(SpmdWarning, match="9.9 is not known"):
        problems = holdfast.spmd.enable()
    names = [name for rule in all_rules() for name in rule.operators]
    assert problems == [f"{name}: {torch_versions.unsupported_reason()}" for name in names]
    lines = holdfast.spmd.report()
    assert sorted(line.operator for line in lines) == sorted(f"aten.{name}" for name in names)
    assert not any(line.is_installed for line in lines)
    monkeypatch.undo()
    assert _state() == before
    holdfast.spmd.disable()
    assert holdfast.spmd.report() == []


def test_a_dispatcher_with_other_parameters_is_left_alone(monkeypatch):
    before = _state()
    dispatcher = type(torch_dispatch.dispatcher())
    monkeypatch.setattr(dispatcher, "unwrap_to_op_info", lambda self, op_call, args: None)
    with pytest.warns(SpmdWarning, match=r"unwrap_to_op_info takes \(self, op_call, args\), not"):
        problems = holdfast.spmd.enable()
    assert len(problems) > 200
    assert _state() == before


def test_a_part_whose_names_changed_is_left_out_by_name(monkeypatch):
    from torch.nn.utils import clip_grad

    def changed(tensors, norm_type, foreach, error_if_nonfinite=False):
        raise AssertionError("must not be called")

    monkeypatch.setattr(clip_grad, "_get_total_norm", changed)
    monkeypatch.delattr(torch_versions.utils, "is_tensor_shardable")
    with pytest.warns(SpmdWarning, match="_get_total_norm takes"):
        problems = holdfast.spmd.enable()
    try:
        assert [problem.partition(":")[0] for problem in problems] == ["fallback", "methods"]
        assert "is_tensor_shardable is missing" in problems[0]
        families = {line.family for line in holdfast.spmd.report() if line.is_installed}
        assert "methods" not in families
        assert {"loss", "functions"} <= families
        assert clip_grad._get_total_norm is changed
    finally:
        holdfast.spmd.disable()


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name.part}: {name.path}")
def test_a_private_name_that_is_gone_leaves_out_its_part(name: PrivateName, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _state()
    module, _, attributes = name.path.partition(":")
    *path, last = attributes.split(".")
    found = importlib.import_module(module)
    if last == "SKIP":  # an enum of C++ keeps its members
        monkeypatch.setattr(found, path[0], types.SimpleNamespace())
    else:
        monkeypatch.delattr(functools.reduce(getattr, path, found), last)
    with pytest.warns(SpmdWarning, match=re.escape(last)):
        problems = holdfast.spmd.enable()
    holdfast.spmd.disable()
    monkeypatch.undo()
    assert _state() == before
    assert len(problems) > 200 if name.part == RULES else name.part in {text.partition(":")[0] for text in problems}


def test_every_operator_of_every_rule_exists_on_the_newest_known_torch():
    left_out = holdfast.spmd.enable()
    holdfast.spmd.disable()
    assert left_out == []


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"only": "loss"}, "give a list"),
        ({"only": []}, "chooses nothing"),
        ({"only": ["loss"], "exclude": ["loss"]}, "choose nothing"),
        ({"only": ["mse_loss"], "exclude": ["loss"]}, "choose nothing"),
        ({"exclude": ["*"]}, "choose nothing"),
        ({"check_indices": "yes"}, "True or False"),
        ({"only": ["losses"]}, "neither a family nor an operator"),
        ({"exclude": ["mse_los"]}, "like 'mse_loss.default'"),
    ],
)
def test_a_choice_that_names_nothing_is_refused_and_changes_nothing(choice, words):
    holdfast.spmd.enable(only=["loss"])
    try:
        before = holdfast.spmd.report()
        with pytest.raises(holdfast.spmd.SpmdError, match=words):
            holdfast.spmd.enable(**choice)
        assert holdfast.spmd.report() == before
    finally:
        holdfast.spmd.disable()
