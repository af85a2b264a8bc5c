"""copy.deepcopy of a Partial: sends nothing, and keeps placements, gradient and attributes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.dist.harness import run_ranks


def _copied() -> list[Any]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, found = init_device_mesh("cpu", (2,)), []
    rows = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    parameter.grad = torch.ones_like(parameter)
    for x in (rows.sum(), rows.norm(), DTensor.from_local(torch.ones(3), mesh, [Partial("max")]), parameter):
        with CommDebugMode() as messages:
            one, two = copy.deepcopy([x, x])
        local = x.to_local().clone()
        x.detach().to_local().add_(1.0)
        found += [
            messages.get_total_counts() == 0,
            one is two and type(one) is type(x) and isinstance(one, nn.Parameter) == isinstance(x, nn.Parameter),
            one.placements == x.placements and one.requires_grad == x.requires_grad,
            torch.equal(one.to_local(), local),
        ]
    return [*found, one.grad is not parameter.grad, one.grad.full_tensor().tolist() == [1.0] * 3]


def test_a_deep_copy_of_a_partial_sends_nothing():
    assert run_ranks(2, _copied, deadline_s=120) == [[True] * 18] * 2
