"""A small encoder with dropout, and batches for it."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, DIM = 12, 16


class Encoder(nn.Module):
    """A network of [rows, WIDTH] to [rows, DIM]; as sentence-transformers calls one, and as a function of a tensor."""

    max_seq_length = 8

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers = nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, DIM)
        self.net = nn.Sequential(*layers)

    def forward(self, features):
        if isinstance(features, torch.Tensor):
            return self.net(features)
        return {**features, "sentence_embedding": self.net(features["x"])}

    def get_embedding_dimension(self) -> int:
        return DIM


def encoder(seed: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Encoder:
    torch.manual_seed(seed)
    return Encoder(dropout).to(dtype).train()


def texts(rows: int, columns: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64).to(dtype) for _ in range(columns)]


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def gradients(module: nn.Module) -> torch.Tensor:
    return torch.cat([gradient_of(parameter).flatten() for parameter in module.parameters()])


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """||difference|| / ||truth||."""
    return float((found - truth).norm() / truth.norm())
