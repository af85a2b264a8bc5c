"""Attention, causal or bidirectional, with grouped key-value heads and rotary embeddings (as rotate_half)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from holdfast.train.models.dropout import Dropout, Grid
from holdfast.train.models.mixed_precision_layers import Linear, RMSNorm
from holdfast.train.models.model_config import ModelConfig

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(config: ModelConfig, length: int, device: torch.device) -> Rotation:
    """Return the cosines and sines of the rotary angles by position, in fp32: [length, 1, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    speeds = 1.0 / (config.rope_theta**exponents)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * speeds
    both = torch.cat((angles, angles), dim=-1)[:, None, :]
    return both.cos(), both.sin()


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of [batch, length, heads, head_dim]."""
    cos, sin = (part.to(x.dtype) for part in by)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Attention over the heads of its projections: all heads, or those of one tensor-parallel rank."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, config.traits.qkv_bias
        self.head_dim = size
        self.dropout = Dropout(config.attention_dropout, f"layers/{layer}/attention")
        self.q_proj = Linear(hidden, config.num_attention_heads * size, bias=bias)
        self.k_proj = Linear(hidden, config.num_key_value_heads * size, bias=bias)
        self.v_proj = Linear(hidden, config.num_key_value_heads * size, bias=bias)
        self.o_proj = Linear(config.num_attention_heads * size, hidden, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.traits.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.traits.qk_norm else nn.Identity()

    def forward(
        self, x: torch.Tensor, by: Rotation, grid: Grid | None = None, *, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply attention; `grid` determines dropout, and None disables it.

        `visible` makes it bidirectional: the positions that every query attends to, [batch, length], bool. Without
        it, attention is causal.
        """
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), by), rotate(self.k_norm(k), by)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if grid is None:
            gqa = q.shape[1] != k.shape[1]
            mask = None if visible is None else visible[:, None, None, :].expand(-1, 1, q.shape[2], -1)
            out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=gqa)
        else:
            out = self._attend_and_drop(q, k, v, grid, visible)
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _attend_and_drop(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid: Grid, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply attention without the fused kernel, whose dropout depends on a generator and a rank's heads."""
        each = q.shape[1] // k.shape[1]
        k, v = (heads.repeat_interleave(each, dim=1) for heads in (k, v))
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
        if visible is None:
            hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        else:
            hidden = ~visible[:, None, None, :]
        shares = functional.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1, dtype=torch.float32)
        return self.dropout(shares, grid).to(q.dtype) @ v

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)
