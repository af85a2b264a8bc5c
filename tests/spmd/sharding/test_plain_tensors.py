"""Plain tensors beside DTensors: masks and what gradients make are taken, a user's numbers are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import holdfast.spmd
from holdfast.spmd.base import torch_dispatch
from holdfast.spmd.rules.scan import cumsum_gradient
from tests.dist.harness import run_ranks


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
    assert torch.ops.aten.cat.default in torch_dispatch.handlers()
    with pytest.raises(RuntimeError, match="may differ from rank to rank"):
        torch.cat([x, torch.ones(1, 2)])
    with pytest.raises(RuntimeError, match="may differ from rank to rank"):
        torch.where(torch.ones(2, 2, dtype=torch.bool), x, x)
    holdfast.spmd.disable()
    assert torch.ops.aten.cat.default not in torch_dispatch.handlers()


def test_what_was_taken_over_still_works(mesh):
    x = _placed(torch.rand(2, 2), mesh)
    torch.prod(x, 0)
    torch.cumprod(x, 0)
    assert torch.cat([x, x], 1).shape == (2, 4)
    assert torch.where(x > 0.5, x, x).shape == (2, 2)


def test_nothing_is_left_behind_by_scans_and_products(mesh):
    holdfast.spmd.disable()
    before = dict(torch_dispatch.handlers())
    holdfast.spmd.enable()
    x = _placed(torch.rand(4, 3) + 0.5, mesh).requires_grad_()
    (torch.cumsum(x, 0).sum() + torch.cumprod(x, 0).sum() + torch.prod(x, 0).sum()).backward()
    cumsum_gradient.flip_locally_in_gradients()
    holdfast.spmd.disable()
    assert dict(torch_dispatch.handlers()) == before


def test_attention_takes_a_plain_mask_and_refuses_plain_numbers(mesh):
    q, k, v = torch.randn(3, 2, 4, 5, 6)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    found = F.scaled_dot_product_attention(*(_placed(x, mesh) for x in (q, k, v)), attn_mask=mask)
    assert torch.allclose(found.full_tensor(), F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    with pytest.raises(RuntimeError, match="mixed"):
        F.scaled_dot_product_attention(*(_placed(x, mesh) for x in (q, k, v)), attn_mask=mask.float())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss_takes_plain_targets_and_lengths(mesh, reduction):
    x = torch.randn(8, 3, 5).log_softmax(-1)
    targets, lengths = (
        torch.tensor([[1, 2, 3], [2, 2, 1], [4, 1, 2]]),
        (torch.tensor([8, 7, 8]), torch.tensor([3, 2, 3])),
    )
    leaf, placed = x.clone().requires_grad_(), _placed(x, mesh).requires_grad_()
    expected = F.ctc_loss(leaf, targets, *lengths, reduction=reduction)
    found = F.ctc_loss(placed, targets, *lengths, reduction=reduction)
    expected.sum().backward()
    found.sum().backward()
    assert torch.allclose(found.full_tensor(), expected)
    assert torch.allclose(placed.grad.full_tensor(), leaf.grad)


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_index_reduce_and_weighted_bags_take_plain_indices(mesh):
    x, index = torch.randn(4, 3), torch.tensor([0, 2, 2])
    found = _placed(x, mesh).index_reduce(0, index, _placed(torch.ones(3, 3), mesh), "amax")
    assert torch.equal(found.full_tensor(), x.index_reduce(0, index, torch.ones(3, 3), "amax"))
    bags, weights = torch.tensor([[0, 1], [3, 3]]), torch.rand(2, 2)
    leaf, placed = weights.clone().requires_grad_(), _placed(weights, mesh).requires_grad_()
    F.embedding_bag(bags, x, mode="sum", per_sample_weights=leaf).square().sum().backward()
    F.embedding_bag(bags, _placed(x, mesh), mode="sum", per_sample_weights=placed).square().sum().backward()
    assert torch.allclose(placed.grad.full_tensor(), leaf.grad)


def test_the_gradient_of_a_plain_value_that_is_written_is_plain(mesh):
    y, value = _placed(torch.rand(4, 3), mesh).requires_grad_(), torch.ones(3, requires_grad=True)
    written = y * 1
    written[1:3] = value
    (first,) = torch.autograd.grad(written.pow(3).sum(), value, create_graph=True)
    assert not isinstance(first, DTensor) and torch.equal(first, torch.full((3,), 6.0))
    first.sum().backward()
    assert torch.equal(value.grad, torch.full((3,), 12.0))


ROWS, IDS, TABLE = torch.arange(24.0).view(4, 6).sin(), torch.tensor([1, 3, 3, 6]), torch.arange(28.0).view(7, 4)
CHANNELS = torch.arange(6.0)


def _max_norm(place, table):
    F.embedding(place(IDS), table, max_norm=0.5)
    return table


def _with_gradient(place, table):
    leaf = table.clone().requires_grad_()
    F.embedding(place(IDS), leaf).pow(2).sum().backward()
    return leaf.grad


# Each with a plain tensor that it is given beside DTensors; the first argument places the others.
BESIDE_PLAIN = {
    "embedding": (lambda place, table: F.embedding(place(IDS), table), TABLE),
    "gradient of an embedding": (_with_gradient, TABLE),
    "max_norm": (_max_norm, TABLE),
    "embedding_bag": (lambda place, table: F.embedding_bag(place(IDS.view(2, 2)), table), TABLE),
    "group_norm": (lambda place, x: F.group_norm(x.view(2, 6, 2), 2, place(CHANNELS), place(CHANNELS)), ROWS),
    "layer_norm": (lambda place, x: F.layer_norm(x, (6,), place(CHANNELS), place(CHANNELS)), ROWS),
    "masked_fill": (lambda place, x: x.masked_fill(place(x > 0), 1.0), ROWS),
    "masked_fill_": (lambda place, x: x.masked_fill_(place(x > 0), 1.0), ROWS),
    "index_add_": (lambda place, x: x.index_add_(0, place(torch.tensor([0, 2])), place(ROWS[:2] + 1)), ROWS),
    "x[mask] = 0": (lambda place, x: (x.__setitem__(place(x > 0), 0.0), x)[1], ROWS),
    "searchsorted": (lambda place, x: torch.searchsorted(CHANNELS, place(x)), ROWS),
    "cross_entropy": (lambda place, x: F.cross_entropy(x, place(torch.arange(4))), ROWS),
    "conv1d": (lambda place, x: F.conv1d(x.view(1, 4, 6), place(torch.ones(2, 4, 3))), ROWS),
    "where": (lambda place, x: torch.where(place(x > 0), x, 0.0), ROWS),
}


def _implicitly_replicated():
    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for name, (act, plain) in BESIDE_PLAIN.items():
        for placement in (Shard(0), Replicate()):
            own, other = plain.clone(), plain.clone()
            expected = act(lambda whole: whole, own)
            with implicit_replication():
                found = act(lambda whole, to=placement: distribute_tensor(whole.clone(), mesh, [to]), other)
            found = found.full_tensor() if isinstance(found, DTensor) else found
            if not (torch.allclose(found, expected) and torch.allclose(other, own)):
                wrong.append((name, placement))
    return wrong


def test_plain_tensors_are_replicas_under_implicit_replication():
    assert run_ranks(2, _implicitly_replicated, deadline_s=120) == [[], []]


def test_a_plain_table_of_one_element_is_a_replica(mesh):
    ids = DTensor.from_local(torch.zeros(4, dtype=torch.long), mesh, [Shard(0)])
    assert torch.equal(F.embedding(ids, torch.ones(1, 1)).full_tensor(), torch.ones(4, 1))
