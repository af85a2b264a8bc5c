"""Meshes with an axis longer than the dim that it shards: some ranks have no part, and all must decide alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from tests.dist.harness import run_ranks
from tests.spmd.judge import place

X = torch.arange(6.0).view(3, 2)
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "x[:, i]": lambda x, i: x[:, i],
    "x[i]": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(1, i),
    "gather": lambda x, i: x.gather(1, i.expand(3, 2)),
    "flatten": lambda x, i: torch.stack([x, x], 2).flatten(),
    "index_put": lambda x, i: x.index_put((i,), x[0] * 2),
    "x[::2]": lambda x, i: x[::2],
    "x[1:]": lambda x, i: x[1:],
    "roll": lambda x, i: x.roll(1, 0),
    "flip": lambda x, i: x.flip(0),
    "cumsum": lambda x, i: x.cumsum(0),
    "sort": lambda x, i: x.sort(0, descending=True).values,
    "cat": lambda x, i: torch.cat([x, x * 2]),
}


def _findings(shape: tuple[int, int]) -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", shape), []
    for name, run in CALLS.items():
        for places in ((Shard(1), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(1))):
            plain, placed = X.clone().requires_grad_(), place(X, mesh, places).requires_grad_()
            index = torch.tensor([1, 0])
            expected, found = run(plain, index), run(placed, place(index, mesh, (Replicate(), Replicate())))
            expected.square().sum().backward()
            found.square().sum().backward()
            pairs = ((found, expected), (placed.grad, plain.grad))
            if not all(torch.equal(ours.full_tensor(), theirs) for ours, theirs in pairs):
                wrong.append(f"{name} {places}")
    return wrong


@pytest.mark.full
@pytest.mark.parametrize("shape", [(1, 4), (2, 3), (4, 1)])
def test_ranks_without_a_part_look_up_as_the_others_do(shape):
    ranks = math.prod(shape)
    assert run_ranks(ranks, _findings, shape, deadline_s=120) == [[]] * ranks
