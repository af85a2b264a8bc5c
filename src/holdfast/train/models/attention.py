"""Causal attention with grouped key-value heads and rotary positions (Hugging Face's half-turn convention)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from holdfast.train.models.config import ModelConfig
from holdfast.train.models.layers import Linear, RMSNorm

Rotation = tuple[torch.Tensor, torch.Tensor]


def rotation(config: ModelConfig, length: int, device: torch.device) -> Rotation:
    """Cosines and sines of the angles by position, in fp32: [length, 1, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    speeds = 1.0 / (config.rope_theta**exponents)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * speeds
    both = torch.cat((angles, angles), dim=-1)[:, None, :]
    return both.cos(), both.sin()


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Turn the pairs (i, i + head_dim / 2) of [batch, length, heads, head_dim]."""
    cos, sin = (part.to(x.dtype) for part in by)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Works on as many heads as its projections give: all, or those of one tensor-parallel rank."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, config.traits.qkv_bias
        self.head_dim = size
        self.dropout = config.attention_dropout
        self.q_proj = Linear(hidden, config.num_attention_heads * size, bias=bias)
        self.k_proj = Linear(hidden, config.num_key_value_heads * size, bias=bias)
        self.v_proj = Linear(hidden, config.num_key_value_heads * size, bias=bias)
        self.o_proj = Linear(config.num_attention_heads * size, hidden, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.traits.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.traits.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, by: Rotation) -> torch.Tensor:
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(self.q_norm(q), by), rotate(self.k_norm(k), by)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)
