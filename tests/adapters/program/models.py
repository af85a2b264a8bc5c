"""Models of our own for programs: everything at once, a CNN, a UNet, a decoder."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

AUTO = torch.export.Dim.AUTO


class Everything(nn.Module):
    """Tied weights, BatchNorm, a buffer that no checkpoint has, NaN, no_grad, branches on sizes, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, 16)
        self.proj = nn.Linear(16, 16)
        self.bn = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("mask", torch.full((16,), float("-inf")), persistent=False)

    def forward(self, ids, *, scale=None, shift=2):
        hidden = self.proj(self.emb(ids))
        rows, length, width = hidden.shape
        hidden = self.bn(hidden.reshape(rows * length, width)).view(rows, length, width)
        hidden = hidden.masked_fill(torch.zeros(16).bool(), float("nan")) + self.mask.exp()
        with torch.no_grad():
            places = torch.arange(length, device=hidden.device) * shift
        if length > 5 and length % 2 == 0:
            hidden = hidden + 1
        if scale is not None:
            hidden = hidden * scale
        return {"logits": self.head(hidden) + places[:, None], "sizes": (hidden.shape[1] // 2, None, 3)}


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2)
        self.group = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, pixels):
        hidden = F.max_pool2d(F.relu(self.norm(self.stem(pixels))), 2)
        hidden = F.gelu(self.group(self.down(hidden)), approximate="tanh")
        return F.log_softmax(self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1)), dim=-1)


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.smooth = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, image, time):
        first = F.silu(self.first(image))
        wave = torch.cat([torch.sin(time[:, None] * 3.0), torch.cos(time[:, None] * 3.0)], dim=1).mean(1)
        down = F.silu(self.down(first)) + wave[:, None, None, None]
        up = self.up(F.silu(self.middle(down)))
        larger = F.interpolate(up, size=first.shape[-2:], mode="bilinear", align_corners=False)
        return self.last(F.silu(self.smooth(torch.cat([first, larger], dim=1))))


class Decoder(nn.Module):
    """A small decoder with rotary positions and grouped heads, in plain torch."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, width)
        self.layers = nn.ModuleList(DecoderLayer(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids):
        hidden = self.emb(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class DecoderLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.after = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden):
        rows, length, width = hidden.shape
        q, k, v = (
            part.view(rows, length, 4, -1).transpose(1, 2) for part in self.qkv(self.before(hidden)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        gate, value = self.up(self.after(hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * value)


def everything_inputs(rows: int = 2, length: int = 8):
    return (torch.randint(0, 32, (rows, length)),), {"scale": torch.ones(1) * 1.5, "shift": 2}


EVERYTHING_SIZES = {"ids": {0: torch.export.Dim("batch"), 1: AUTO}, "scale": None, "shift": None}
