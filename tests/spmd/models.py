"""The networks that the training tests train: small, with every kind of layer that their large kin have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block as in ResNet-18."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.short = nn.Sequential()
        if stride > 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class Residual(nn.Module):
    """ResNet-18 with an eighth of its channels: stem, pooling, four stages of two blocks, classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        stages = []
        for before, after, stride in ((8, 8, 1), (8, 16, 2), (16, 32, 2), (32, 64, 2)):
            stages += [Block(before, after, stride), Block(after, after, 1)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1))


class Conditioned(nn.Module):
    """A residual block of a diffusion model: group norms, and the time added to every pixel."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, 1, 1)
        self.time = nn.Linear(16, after)
        self.norm2, self.conv2 = nn.GroupNorm(4, after), nn.Conv2d(after, after, 3, 1, 1)
        self.short = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(time)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.short(x)


class Attention(nn.Module):
    """Every pixel looks at every other, with two heads."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.mix = nn.Linear(channels, 3 * channels)
        self.leave = nn.Linear(channels, channels)

    def forward(self, x):
        rows = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(rows).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + self.leave(mixed).transpose(1, 2).unflatten(2, x.shape[2:])


class Diffuser(nn.Module):
    """A UNet as diffusion models have it: down, attention in the middle, up, a skip, the time everywhere."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.arange(1, 9).float())
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter = nn.Conv2d(3, 8, 3, 1, 1)
        self.first = Conditioned(8, 8)
        self.down = nn.Conv2d(8, 16, 3, 2, 1)
        self.middle, self.attend = Conditioned(16, 16), Attention(16)
        self.up = nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.last = Conditioned(16, 8)
        self.smooth = nn.Conv2d(8, 8, 3, 1, 1)
        self.norm, self.leave = nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, x, moment):
        angles = moment[:, None] * self.waves
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        skip = self.first(self.enter(x), time)
        y = self.attend(self.middle(self.down(skip), time))
        y = self.last(torch.cat([self.up(y), skip], 1), time)
        y = F.avg_pool2d(self.smooth(F.interpolate(y, scale_factor=2.0)), 2)
        return self.leave(F.silu(self.norm(y)))
