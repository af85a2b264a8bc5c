"""Forecasts: what a step changes, and what it will add."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.adapters.saving.optimizer_forecast import missing_state_tensors, stepped_tensors


def test_frozen_parameters_are_not_a_steps_to_change() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    stepped = {tensor.data_ptr() for tensor in stepped_tensors(torch.optim.AdamW(model.parameters()))}
    assert stepped == {model.bias.data_ptr()}


def test_state_is_coming_until_it_is_there() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    assert missing_state_tensors(optimizer) == 3 and missing_state_tensors(torch.optim.SGD(model.parameters())) == 0
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert missing_state_tensors(optimizer) == 0
