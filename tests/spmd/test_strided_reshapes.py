"""Reshapes of flattened columns, whose shards are strided: torch takes some of them for plain shards."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.harness import run_ranks

SHAPES = [(8, 6), (4, 12), (24, 2), (16, 3), (8, 2, 3), (2, 24), (48, 1), (1, 48), (48,)]


def _wrong() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(48.0).reshape(8, 6)
    wrong = []
    for shape in SHAPES:
        leaf = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
        found = leaf.reshape(-1).view(shape)
        if not torch.equal(found.full_tensor(), whole.reshape(shape)):
            wrong.append(f"{shape}")
        (found * found).sum().backward()
        if leaf.grad is None or not torch.equal(leaf.grad.full_tensor(), 2 * whole):  # type: ignore[attr-defined]
            wrong.append(f"gradient of {shape}")
    return wrong


@pytest.mark.timeout(120)
def test_flattened_columns_reshape_as_on_one_device() -> None:
    assert run_ranks(2, _wrong, deadline_s=100) == [[], []]
