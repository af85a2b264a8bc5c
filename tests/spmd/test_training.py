"""Networks that train on shards as on one device: ten steps, loss by loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.dist.harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

STEPS = 10


class Block(nn.Module):
    """A residual block as in ResNet-18."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 or before != after else nn.Identity()

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class Residual(nn.Module):
    """A small ResNet: stem, pooling, blocks, classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(4, 8, 3, 1, 1)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class Diffuser(nn.Module):
    """A UNet block of a diffusion model: group norms, a time embedding, down, up, a skip, attention in the middle."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(4, 8, 3, 1, 1)
        self.norm1 = nn.GroupNorm(4, 8)
        self.down = nn.Conv2d(8, 16, 3, 2, 1)
        self.time = nn.Linear(6, 16)
        self.norm2 = nn.GroupNorm(4, 16)
        self.attend = nn.Linear(16, 48)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.leave = nn.Conv2d(16, 5, 1)

    def forward(self, x):
        first = F.silu(self.norm1(self.enter(x)))
        y = self.down(first)
        times = x.mean((2, 3))
        y = y + self.time(torch.cat([times, times[:, :2]], 1))[:, :, None, None]
        y = F.silu(self.norm2(y))
        rows = y.flatten(2).transpose(1, 2)
        query, key, value = self.attend(rows).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        y = y + mixed.transpose(1, 2).reshape(y.shape)
        return self.leave(torch.cat([self.up(y), first], 1)).mean((2, 3))


def _data():
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(8, 4, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 5, (8,), generator=generator)


def _losses(model, images, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train(kind: str, how: str) -> tuple[list[float], list[float]]:
    import holdfast.spmd

    torch.set_num_threads(1)
    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    images, labels = _data()
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append({"residual": Residual, "diffuser": Diffuser}[kind]().double())
    alone = _losses(models[0], images, labels)
    _place(models[1], mesh, how)
    shards = {"batch": Shard(0), "channels": Shard(1), "space": Shard(2), "weights": Replicate()}
    placed = distribute_tensor(images, mesh, [shards[how]])
    targets = distribute_tensor(labels, mesh, [Shard(0) if how == "batch" else Replicate()])
    return alone, _losses(models[1], placed, targets)


def _place(model, mesh, how):
    """Parameters are replicated; for "weights" the convolutions are sharded by output channels."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = how == "weights" and isinstance(module, nn.Conv2d)
            place = [Shard(0)] if split else [Replicate()]
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh, place)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, distribute_tensor(buffer, mesh, [Replicate()]))


@pytest.mark.parametrize("how", ["batch", "channels", "space", "weights"])
@pytest.mark.parametrize("kind", ["residual", "diffuser"])
def test_ten_steps_have_the_losses_of_one_device(kind, how):
    for alone, together in run_ranks(2, _train, kind, how, deadline_s=240):
        assert together == pytest.approx(alone, abs=1e-6)
        assert alone[-1] < alone[0]
