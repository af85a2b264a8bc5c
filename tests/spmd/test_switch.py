"""Turning the rules on, off, and choosing among them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

import holdfast.spmd
from holdfast.spmd import switch, torch_private
from holdfast.spmd.methods import stands


def _state():
    dispatcher = torch_private.dispatcher()
    functions = [getattr(stand.owner, stand.name) for stand in stands()]
    functions += [torch.nn.functional.pad, torch.nn.functional.instance_norm]
    functions += [torch_private.utils.is_tensor_shardable, torch_private._matrix_ops.is_tensor_shardable]
    losses = dict(torch_private.loss_parallel_table())
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
        assert set(installed.values()) == {"loss"}
        assert "aten.mse_loss.default" not in installed
        assert "aten.huber_loss.default" in installed
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
    problems = holdfast.spmd.enable()
    assert "9.9 is not known" in problems[0]
    assert _state() == before
    assert [line.is_installed for line in holdfast.spmd.report()] == [False]
    switch.SWITCH.left_out.clear()


def test_every_operator_of_every_rule_exists_on_the_newest_known_torch():
    left_out = holdfast.spmd.enable()
    holdfast.spmd.disable()
    assert left_out == []
