"""Networks that train on shards as on one device: ten steps, loss by loss.

`make test` runs a few ways to shard; `pytest --full tests/spmd/test_training.py` runs all, on two ranks and on four.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.spmd.models import Diffuser, Residual

STEPS = 10
BATCH = 7  # divides by no number of ranks
WAYS = ("batch", "channels", "space", "batch and space")
QUICK = {("residual", "space", 2), ("diffuser", "channels", 2), ("diffuser", "batch and space", 2)}


def _data(kind):
    generator = torch.Generator().manual_seed(3)
    side = 32 if kind == "residual" else 8
    images = torch.randn(BATCH, 3, side, side, generator=generator, dtype=torch.float64)
    if kind == "residual":
        return [images, torch.randint(0, 5, (BATCH,), generator=generator)]
    moments = torch.rand(BATCH, generator=generator, dtype=torch.float64)
    return [images, moments, torch.randn(images.shape, generator=generator, dtype=torch.float64)]


def _loss(kind, model, data):
    if kind == "residual":
        images, labels = data
        return F.cross_entropy(model(images), labels, label_smoothing=0.1)
    images, moments, noise = data
    return F.mse_loss(model(images + noise, moments), noise)


def _losses(kind, model, data):
    if kind == "residual":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(kind, model, data)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train(kind: str, way: str) -> tuple[list[float], list[float]]:
    import holdfast.spmd

    holdfast.spmd.enable()
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if way == "batch and space" else (world,))
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append({"residual": Residual, "diffuser": Diffuser}[kind]().double())
    data = _data(kind)
    alone = _losses(kind, models[0], data)
    _place(models[1], mesh, way)
    placed = [distribute_tensor(item, mesh, _places(way, item)) for item in data]
    return alone, _losses(kind, models[1], placed)


def _places(way, item):
    """Where a tensor of the batch goes: vectors have no space."""
    batch, space = Shard(0), Shard(2) if item.ndim == 4 else Replicate()
    return {"batch": [batch], "channels": [Replicate()], "space": [space], "batch and space": [batch, space]}[way]


def _place(model, mesh, way):
    """Parameters are replicated; by "channels" every layer keeps a part of what it gives out."""
    for module in model.modules():
        turned = isinstance(module, nn.ConvTranspose2d)
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = Shard(1 if turned and name == "weight" else 0)
            places = [cut if way == "channels" else Replicate()] * mesh.ndim
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh, places)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, distribute_tensor(buffer, mesh, [Replicate()] * mesh.ndim))


def _every_way():
    for kind, way, world in itertools.product(("residual", "diffuser"), WAYS, (2, 4)):
        quick = (kind, way, world) in QUICK
        yield pytest.param(kind, way, world, marks=() if quick else pytest.mark.full)


@pytest.mark.sliced(4)
@pytest.mark.parametrize(("kind", "way", "world"), list(_every_way()))
def test_ten_steps_have_the_losses_of_one_device(kind, way, world):
    for alone, together in run_ranks(world, _train, kind, way, deadline_s=240):
        assert together == pytest.approx(alone, abs=1e-6)
        assert alone[-1] < alone[0]
