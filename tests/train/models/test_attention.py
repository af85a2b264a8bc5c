"""Attention by hand, where dropout needs it, is the fused kernel's; and it drops the share that a head gives a key."""

from __future__ import annotations

import pytest
import torch

from holdfast.train.models.attention import Attention, rotation
from holdfast.train.models.dropout import attention_grid, dropout_mask, sample_keys
from tests.dist.train_cases import model

LENGTH, HEADS = 8, 4


def made(rate: float) -> tuple[Attention, torch.Tensor]:
    config = model("qwen3", attention_dropout=rate)
    torch.manual_seed(2)
    attention = Attention(config, layer=3)
    return attention, torch.randn(2, LENGTH, config.hidden_size)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_by_hand_it_is_what_the_fused_kernel_gives(dtype: torch.dtype, near: float) -> None:
    attention, x = made(0.0)
    by = rotation(model("qwen3"), LENGTH, x.device)
    fused = attention(x.to(dtype), by)
    by_hand = attention(x.to(dtype), by, attention_grid(sample_keys(1, 1, 0, 2), 0, HEADS, LENGTH))
    assert by_hand.dtype == dtype
    torch.testing.assert_close(by_hand, fused, rtol=near, atol=near)


@pytest.mark.parametrize("by_hand", [False, True])
def test_bidirectional_attention_sees_every_visible_position_and_no_other(by_hand: bool) -> None:
    attention, x = made(0.0)
    by = rotation(model("qwen3"), LENGTH, x.device)
    grid = attention_grid(sample_keys(1, 1, 0, 2), 0, HEADS, LENGTH) if by_hand else None
    visible = torch.ones(2, LENGTH, dtype=torch.bool)
    visible[1, 6:] = False
    with torch.no_grad():
        out = attention(x, by, grid, visible=visible)
        for position in range(LENGTH):
            other = x.clone()
            other[:, position] += 1.0
            change = (attention(other, by, grid, visible=visible) - out).abs().amax(2)
            assert (change[0] > 1e-4).all()
            others = change[1, torch.arange(LENGTH) != position]
            assert (others > 1e-4).all() if position < 6 else (others == 0).all()


def test_bidirectional_attention_by_hand_is_what_the_fused_kernel_gives() -> None:
    attention, x = made(0.0)
    by = rotation(model("qwen3"), LENGTH, x.device)
    visible = torch.arange(LENGTH) < torch.tensor([[LENGTH], [3]])
    by_hand = attention(x, by, attention_grid(sample_keys(1, 1, 0, 2), 0, HEADS, LENGTH), visible=visible)
    torch.testing.assert_close(by_hand, attention(x, by, visible=visible), rtol=1e-5, atol=1e-5)


def test_a_dropped_key_gives_its_query_nothing() -> None:
    """Values that are one at a single position show what weight it has."""
    attention, _ = made(0.5)
    grid = attention_grid(sample_keys(1, 1, 0, 2), 0, HEADS, LENGTH)
    gone = dropout_mask(grid, 0.5, "layers/3/attention")
    q, k = torch.zeros(2, HEADS, LENGTH, 8), torch.zeros(2, 2, LENGTH, 8)
    for key in range(LENGTH):
        v = torch.zeros(2, 2, LENGTH, 8)
        v[:, :, key] = 1.0
        out = attention._attend_and_drop(q, k, v, grid)[..., 0]
        weights = 2.0 / torch.arange(1, LENGTH + 1).expand(2, HEADS, LENGTH)
        seen = torch.arange(LENGTH) >= key
        torch.testing.assert_close(out, torch.where(gone[..., key] | ~seen, 0.0, weights))
