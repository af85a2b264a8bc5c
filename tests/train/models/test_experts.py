"""Stacked experts compute what a loop over tokens computes, and experts without tokens learn nothing."""

from __future__ import annotations

import torch
from torch.nn import functional

from holdfast.train.models.experts import Experts


def made() -> Experts:
    torch.manual_seed(1)
    experts = Experts(4, 6, 5)
    torch.nn.init.normal_(experts.gate_up_proj)
    torch.nn.init.normal_(experts.down_proj)
    return experts


def by_token(experts: Experts, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(tokens)
    for row, token in enumerate(tokens):
        for number, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            gate, up = (experts.gate_up_proj[number] @ token).chunk(2)
            out[row] = out[row] + weight * (experts.down_proj[number] @ (functional.silu(gate) * up))
    return out


def test_every_token_goes_through_its_own_experts() -> None:
    experts = made()
    tokens = torch.randn(7, 6)
    chosen = torch.tensor([[0, 1], [3, 0], [1, 3], [0, 3], [3, 1], [1, 0], [0, 1]])
    weights = torch.rand(7, 2)
    torch.testing.assert_close(experts(tokens, chosen, weights), by_token(experts, tokens, chosen, weights))


def test_an_expert_that_nobody_chose_has_a_gradient_of_zeros() -> None:
    experts = made()
    chosen = torch.tensor([[0, 1], [3, 0]])
    experts(torch.randn(2, 6), chosen, torch.rand(2, 2)).sum().backward()
    assert experts.down_proj.grad is not None and experts.gate_up_proj.grad is not None
    assert not experts.down_proj.grad[2].any() and not experts.gate_up_proj.grad[2].any()
    assert experts.down_proj.grad[3].any()
