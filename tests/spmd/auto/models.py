"""Small models that are not the trainer's: leaves side by side in a block, images, and work that depends on values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    """A transformer layer as many write it: all projections in one module, biases, norms inside."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        parts = [part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer(layers: int = 2) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(32, 16), *(Layer() for _ in range(layers)), nn.Linear(16, 32)).double()


class Images(nn.Module):
    """Convolutions with a skip, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.wide, self.narrow = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.Conv2d(16, 8, 1, bias=False)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = self.norm(x + self.narrow(F.relu(self.wide(x))))
        return self.head(x.mean((2, 3)))


class Chooses(nn.Module):
    """Work on the rows that are positive: no rule can say how many."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0] @ self.weight
