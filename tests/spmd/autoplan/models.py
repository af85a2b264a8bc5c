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


class Recurrent(nn.Module):
    """First states and a mask are made in the forward, where nobody can place them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(8, 12, num_layers=2, batch_first=True), nn.Linear(12, 4)
        self.scale = torch.arange(1.0, 5.0, dtype=torch.float64)  # no buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layers(x)
        scores = (y @ y.transpose(1, 2)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, float("-inf"))
        mask = torch.full((x.shape[1],), 2.0, dtype=x.dtype)
        kept = torch.where(torch.arange(4) > 1, self.out((scores * mask).softmax(-1) @ y), 1.0)
        return kept * self.scale


class TwoNames(nn.Module):
    """A block that stands in two places, and a matrix that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.others = nn.ModuleDict({"again": self.block, "out": nn.Linear(8, 4)})
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.alias = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.others["again"](self.block(x)) @ self.weight
        return self.others["out"](x.tanh() @ self.alias)


class Prompted(nn.Module):
    """A model that computes with parameters between its layers: its own, and those of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(256, 16), nn.ModuleList(Layer() for _ in range(2))
        self.positions = nn.Parameter(torch.randn(1, 8, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embed.weight)


class Named(nn.Module):
    """Calls its parts by keywords, and takes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return self.down(input=F.gelu(self.up(input=batch["x"][0])))


class Frozen(nn.Module):
    """The first part has no gradients: what it gives is made by ranks, but never sent back."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 4)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.base(x))
