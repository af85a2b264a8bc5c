"""Norms of negative order: the smallest numbers count, and an empty shard has none."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.harness import run_ranks


def _negative() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    x = torch.arange(1.0, 4.0).reshape(3, 1)
    for order in (-1.0, -2.0, float("-inf")):
        for shards in (Shard(0), Shard(1)):
            leaf, placed = x.clone().requires_grad_(), distribute_tensor(x, mesh, [shards]).requires_grad_()
            expected, found = (torch.linalg.vector_norm(tensor, order) for tensor in (leaf, placed))
            expected.backward()
            found.backward()
            (listed,) = torch._foreach_norm([placed.detach()], order)
            for ours, theirs in ((found, expected), (placed.grad, leaf.grad), (listed, expected)):
                if not torch.allclose(ours.full_tensor(), theirs):
                    wrong.append(f"{order} {shards}: {ours.full_tensor()}, not {theirs}")
    return wrong


def test_norms_of_negative_order_beside_an_empty_shard():
    assert run_ranks(2, _negative, deadline_s=120) == [[], []]
