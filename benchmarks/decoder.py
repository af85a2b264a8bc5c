"""A decoder in plain torch with the shapes of Llama 3.2 1B, for the benchmarks of programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class DecoderShape:
    """By default 1.04 billion parameters, the head tied to the embedding."""

    layers: int = 16
    width: int = 2048
    wide: int = 8192
    head: int = 64
    groups: int = 4  # query heads for each head of keys and values
    vocab: int = 32_000


TINY = DecoderShape(layers=2, width=64, wide=192, head=16, groups=2, vocab=128)
SMALL = DecoderShape(layers=4, width=128, wide=384, head=16, groups=2, vocab=512)


class RMSNorm(nn.Module):
    """As transformers writes it: six operators, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden.dtype)


class Rotary(nn.Module):
    """Cosines and sines of the positions, computed without gradients."""

    frequencies: torch.Tensor

    def __init__(self, head: int) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("frequencies", torch.empty(head // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        exponents = torch.arange(0, self.head, 2, device=self.frequencies.device) / self.head
        self.frequencies = 1 / 500_000**exponents

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        angles = positions[:, None].float() * self.frequencies.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, narrow = shape.width, shape.width // shape.groups
        self.shape = shape
        self.input_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(width, shape.wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(shape.wide, width, bias=False)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.input_norm(hidden), cos, sin)
        normed = self.mlp_norm(hidden)
        return hidden + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def attention(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, _ = hidden.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(hidden).view(rows, length, -1, self.shape.head).transpose(1, 2) for each in projections)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (
            each[:, :, None].expand(-1, -1, self.shape.groups, -1, -1).reshape(rows, -1, length, self.shape.head)
            for each in (k, v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class Decoder(nn.Module):
    """From token ids of the shape (rows, length) to logits."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.rotary = Rotary(shape.head)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids)
        cos, sin = self.rotary(hidden)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.lm_head(self.norm(hidden))


def make_decoder(shape: DecoderShape, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Return a decoder in eval mode; its rotary frequencies are fp32 whatever the dtype of its weights is."""
    with torch.device(device):
        model = Decoder(shape).to(dtype)
    model.rotary.reset_parameters()
    return model.eval()


def dynamic_sizes() -> tuple[dict[int, Any]]:
    """Return the dynamic_shapes of an export: any number of rows, and any length from 2 on.

    The length is not a named Dim: torch 2.11 cannot prove that min(16 * length, 32 * length) is 16 * length.
    """
    return ({0: torch.export.Dim("rows", max=4096), 1: torch.export.Dim.AUTO},)
