"""Linear layers beside DTensors: a plain input is the rank's part."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from holdfast.train.models.mixed_precision_layers import Linear
from tests.dist.harness import run_ranks


def _gradient_of_both_parts() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    layer = Linear(3, 2, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
    part = torch.full((2, 2, 3), float(mesh.get_local_rank() + 1))
    layer(part).sum().backward()
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor) and gradient.placements == (Partial(),)
    layer.weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="replicated weight"):
        layer(part)
    return gradient.full_tensor().unique().tolist()


def test_the_gradient_of_a_replicated_weight_is_the_sum_over_ranks() -> None:
    assert run_ranks(2, _gradient_of_both_parts, deadline_s=60) == [[12.0]] * 2  # 4 rows of 1 and 4 of 2
