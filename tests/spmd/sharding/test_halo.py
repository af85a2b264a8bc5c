"""Convolution and pooling of images cut by rows or columns: right, sharded still, and only edges are moved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.spmd.beside import Findings, draw, worst
from tests.spmd.judge import Listener

KERNELS = {  # size, stride, padding, dilation
    "same": (3, 1, 1, 1),
    "half": (3, 2, 1, 1),
    "stem": (7, 2, 3, 1),
    "skip": (1, 2, 0, 1),
    "wide": (3, 1, 2, 2),
    "gaps": (2, 3, 0, 1),
    "lopsided": (2, 1, 1, 1),
}
TRANSPOSED = {  # size, stride, padding, output padding, dilation
    "double": (2, 2, 0, 0, 1),
    "overlapping": (3, 2, 1, 1, 1),
    "diffusion": (4, 2, 1, 0, 1),
    "sparse": (3, 3, 0, 1, 2),
}
POOLS = ((3, 2, 1), (2, 2, 0), (3, 1, 1), (3, 3, 0))


def _ways():
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    return (
        *((line, [place]) for place in (Shard(2), Shard(3))),
        *((square, places) for places in ([Shard(0), Shard(2)], [Shard(3), Shard(0)], [Shard(2), Shard(3)])),
    )


def _once(call, image, weights, mesh, places):
    """Forward and every gradient."""
    one = [item.clone().requires_grad_() for item in (image, *weights)]
    other = [distribute_tensor(image, mesh, places).requires_grad_()]
    other += [distribute_tensor(item, mesh, [Replicate()] * mesh.ndim).requires_grad_() for item in weights]
    expected, found = call(*one), call(*other)
    slopes, ours = (torch.autograd.grad(out.sin().sum(), given) for out, given in ((expected, one), (found, other)))
    return worst([found, *ours], [expected, *slopes])


def _calls(generator):
    bias = draw(generator, 6)
    for name, (size, *options) in KERNELS.items():
        weights = (draw(generator, 6, 4, size, size), bias)
        yield name, lambda x, w, b, o=options: F.conv2d(x, w, b, *o), weights
    for name, (size, stride, padding, more, dilation) in TRANSPOSED.items():
        options = {"stride": stride, "padding": padding, "output_padding": more, "dilation": dilation}
        weights = (draw(generator, 4, 6, size, size), bias)
        yield name, lambda x, w, b, o=options: F.conv_transpose2d(x, w, b, **o), weights
    for kernel in POOLS:
        for ceil in (False, True):
            yield f"max {kernel} {ceil}", lambda x, k=kernel, c=ceil: F.max_pool2d(x, *k, ceil_mode=c), ()
            for pads in (False, True):
                yield f"mean {kernel} {ceil} {pads}", lambda x, k=kernel, c=ceil, p=pads: F.avg_pool2d(x, *k, c, p), ()


def _all():
    import holdfast.spmd

    holdfast.spmd.enable()
    findings = Findings()
    generator = torch.Generator().manual_seed(4)
    calls = list(_calls(generator))
    for number, size in enumerate(((16, 12), (9, 7), (13, 16))):
        image = draw(generator, 3, 4, *size)
        for place, (mesh, places) in enumerate(_ways()):
            for name, call, weights in calls[(number + place) % 4 :: 4]:
                findings.check(
                    f"{name} {size} {places}",
                    lambda c=call, i=image, w=weights, m=mesh, p=places: _once(c, i, w, m, p),
                )
    return findings.count, findings.bad


@pytest.mark.full
def test_kernels_reach_over_the_edges():
    for count, bad in run_ranks(4, _all, deadline_s=240):
        assert count > 120
        assert bad == {}


def _moved():
    """For each call: what its result is placed as, and how many bytes went where all would be 24,576."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (4,))
    image = distribute_tensor(draw(torch.Generator().manual_seed(4), 4, 4, 16, 12), mesh, [Shard(2)])
    weight = distribute_tensor(draw(torch.Generator().manual_seed(5), 4, 4, 3, 3), mesh, [Replicate()])
    found = []
    for call in (
        lambda: F.conv2d(image, weight, stride=2, padding=1),
        lambda: F.conv2d(image, weight, padding=1),
        lambda: F.max_pool2d(image, 3, 2, 1),
        lambda: F.avg_pool2d(image, 2),
        lambda: F.conv_transpose2d(image, weight[:, :, :2, :2], stride=2),
    ):
        with Listener() as listener:
            result = call()
        found.append((result.placements, listener.bytes))
    return found


def test_only_edges_are_moved():
    row = 4 * 4 * 12 * 8
    for found in run_ranks(4, _moved, deadline_s=120):
        assert [places for places, _ in found] == [(Shard(2),)] * 5
        assert all(moved <= 2 * row for _, moved in found)
        assert [moved for _, moved in found][3:] == [0, 0]
