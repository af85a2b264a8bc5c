"""Gradients that read what a forward call kept, where that is not what its DTensor says."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.dist.harness import run_ranks


def _log_sigmoid_as_on_a_gpu():
    """There log_sigmoid keeps an empty tensor, and DTensor takes it for a shard of the input's shape."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(-4.0, 4.0, dtype=torch.float64).reshape(4, 2)
    gradient = torch.linspace(0.5, 2.0, 8, dtype=torch.float64).reshape(4, 2)
    expected = gradient * torch.sigmoid(-whole)
    kept = DTensor.from_local(
        whole.new_empty(0), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    found = []
    for dim in (0, 1):
        placed, above = distribute_tensor(whole, mesh, [Shard(dim)]), distribute_tensor(gradient, mesh, [Shard(0)])
        result = torch.ops.aten.log_sigmoid_backward(above, placed, kept)
        found.append(torch.allclose(result.full_tensor(), expected))
    return found


def test_log_sigmoid_needs_nothing_of_its_forward_call():
    assert run_ranks(2, _log_sigmoid_as_on_a_gpu, deadline_s=120) == [[True, True]] * 2
