"""Plain tensors beside DTensors: masks and what gradients make are taken, a user's numbers are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast.spmd
from holdfast.spmd import plain
from holdfast.spmd import torch_private as private


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    holdfast.spmd.enable()
    yield init_device_mesh("cpu", (1,))
    holdfast.spmd.disable()
    dist.destroy_process_group()


def _placed(whole, mesh):
    return DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)


def test_masked_fill_takes_a_plain_mask_and_refuses_plain_numbers(mesh):
    x, mask = torch.randn(4, 3), torch.rand(4, 3) > 0.5
    assert torch.equal(_placed(x, mesh).masked_fill(mask, 2.0).full_tensor(), x.masked_fill(mask, 2.0))
    with pytest.raises(RuntimeError, match="may differ from rank to rank"):
        x.masked_fill(_placed(mask, mesh), 2.0)


def test_gather_takes_plain_indices(mesh):
    x, index = torch.randn(4, 3), torch.tensor([[0, 2, 3], [1, 0, 0]])
    placed = _placed(x, mesh).requires_grad_()
    found = placed.gather(0, index)
    found.sum().backward()
    assert torch.equal(found.full_tensor(), x.gather(0, index))
    assert torch.equal(placed.grad.full_tensor(), torch.zeros(4, 3).scatter_add(0, index, torch.ones(2, 3)))


def test_a_gradient_that_makes_plain_tensors_leaves_a_users_refused(mesh):
    x = _placed(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), mesh).requires_grad_()
    torch.prod(x, 0).sum().backward()
    torch.cumprod(x, 0).sum().backward()
    assert torch.ops.aten.cat.default in private.handlers()
    with pytest.raises(RuntimeError, match="may differ from rank to rank"):
        torch.cat([x, torch.ones(1, 2)])
    with pytest.raises(RuntimeError, match="may differ from rank to rank"):
        torch.where(torch.ones(2, 2, dtype=torch.bool), x, x)
    holdfast.spmd.disable()
    assert torch.ops.aten.cat.default not in private.handlers()


def test_what_was_taken_over_still_works(mesh):
    x = _placed(torch.rand(2, 2), mesh)
    torch.prod(x, 0)
    torch.cumprod(x, 0)
    assert torch.cat([x, x], 1).shape == (2, 4)
    assert torch.where(x > 0.5, x, x).shape == (2, 2)


def test_nothing_is_left_behind_by_scans_and_products(mesh):
    holdfast.spmd.disable()
    before = dict(private.handlers())
    holdfast.spmd.enable()
    x = _placed(torch.rand(4, 3) + 0.5, mesh).requires_grad_()
    (torch.cumsum(x, 0).sum() + torch.cumprod(x, 0).sum() + torch.prod(x, 0).sum()).backward()
    plain.demand_flips()
    holdfast.spmd.disable()
    assert dict(private.handlers()) == before
