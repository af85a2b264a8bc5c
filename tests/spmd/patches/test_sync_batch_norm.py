"""SyncBatchNorm on the CPU and on DTensors, against BatchNorm on one device."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.spmd.beside import Findings, draw, worst

CHANNELS = 6


def _norm(kind, momentum=0.1, affine=True):
    module = kind(CHANNELS, momentum=momentum, affine=affine).double()
    if affine:
        module.weight.data = torch.linspace(0.5, 2.0, CHANNELS).double()
        module.bias.data = torch.linspace(-1.0, 2.0, CHANNELS).double()
    return module


def _state(module):
    return [module.running_mean, module.running_var, module.num_batches_tracked]


def _plain(sizes, shape, momentum, affine):
    """Each rank has a batch of its own size, one has none."""
    rank, start = dist.get_rank(), sum(sizes[: dist.get_rank()])
    batch = draw(torch.Generator().manual_seed(2), sum(sizes), CHANNELS, *shape)
    kind = nn.BatchNorm2d if len(shape) == 2 else nn.BatchNorm1d
    alone, together = _norm(kind, momentum, affine), _norm(nn.SyncBatchNorm, momentum, affine)
    every = batch.clone().requires_grad_()
    own = batch[start : start + sizes[rank]].clone().requires_grad_()
    for _ in range(2):
        expected, found = alone(every), together(own)
    expected.sin().sum().backward()
    found.sin().sum().backward()
    mine = slice(start, start + sizes[rank])
    pairs = [(found, expected[mine]), (own.grad, every.grad[mine]), *zip(_state(together), _state(alone), strict=True)]
    if affine:
        for ours, theirs in ((together.weight, alone.weight), (together.bias, alone.bias)):
            total = ours.grad.clone()
            dist.all_reduce(total)  # each rank has its own share, which DDP would average
            pairs.append((total, theirs.grad))
    alone.eval(), together.eval()
    return worst(*zip(*pairs, (together(batch), alone(batch)), strict=True))


def _placed(mesh, places, kind):
    batch = draw(torch.Generator().manual_seed(2), 5, CHANNELS, 7, 4)
    alone, together = _norm(nn.BatchNorm2d), _norm(kind)
    everywhere = [Replicate()] * mesh.ndim
    for name, item in list(together.named_parameters()):
        setattr(together, name, nn.Parameter(distribute_tensor(item.data, mesh, everywhere)))
    for name, item in list(together.named_buffers()):
        together.register_buffer(name, distribute_tensor(item, mesh, everywhere))
    every, own = batch.clone().requires_grad_(), distribute_tensor(batch, mesh, places).requires_grad_()
    expected, found = alone(every), together(own)
    expected.sin().sum().backward()
    found.sin().sum().backward()
    pairs = [(found, expected), (own.grad, every.grad), *zip(_state(together), _state(alone), strict=True)]
    pairs += [(together.weight.grad, alone.weight.grad), (together.bias.grad, alone.bias.grad)]
    alone.eval(), together.eval()
    return worst(*zip(*pairs, (together(own.detach()), alone(batch)), strict=True))


def _all():
    import holdfast.spmd

    holdfast.spmd.enable()
    findings = Findings()
    for sizes, shape in itertools.product(((2, 2, 2, 2), (3, 1, 0, 2)), ((), (5,), (4, 4))):
        for momentum, affine in ((0.1, True), (None, False)):
            findings.check(
                f"plain {sizes} {shape} {momentum}",
                lambda z=sizes, s=shape, m=momentum, a=affine: _plain(z, s, m, a),
            )
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for mesh, places in (
        *((line, [place]) for place in (Shard(0), Shard(1), Shard(2), Replicate())),
        *((square, [Shard(0), place]) for place in (Shard(1), Shard(2))),
    ):
        for kind in (nn.SyncBatchNorm, nn.BatchNorm2d):
            findings.check(f"placed {places} {kind.__name__}", lambda m=mesh, p=places, k=kind: _placed(m, p, k))
    return findings.count, findings.bad


def test_statistics_are_those_of_all_ranks():
    for count, bad in run_ranks(4, _all, deadline_s=240):
        assert (count, bad) == (24, {})


def _outside():
    import holdfast.spmd
    from holdfast.spmd.base.spmd_errors import UnsupportedCall

    holdfast.spmd.enable()
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    module = nn.SyncBatchNorm(4, process_group=dist.group.WORLD)
    try:
        module(distribute_tensor(torch.randn(4, 4), half, [Shard(0)]))
    except UnsupportedCall as error:
        return "[0, 1, 2, 3]" in str(error)
    return False


def test_a_group_wider_than_the_mesh_is_refused():
    assert run_ranks(4, _outside, deadline_s=120) == [True] * 4
