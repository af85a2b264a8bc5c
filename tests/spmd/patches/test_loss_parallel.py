"""Cross entropy over a sharded vocabulary, with torch's loss_parallel and without."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.dist.harness import run_ranks
from tests.spmd.beside import Findings, draw, worst
from tests.spmd.judge import Listener

IGNORED = 2


def _once(mesh, places, classes, options, weighted, inside):
    """One loss and its gradient; within loss_parallel no class shard may leave the loss Partial."""
    generator = torch.Generator().manual_seed(classes)
    scores, target = draw(generator, 6, classes), torch.randint(0, classes, (6,), generator=generator)
    target[1] = IGNORED
    weight = draw(generator, classes).abs() if weighted else None
    everywhere = [Replicate()] * mesh.ndim
    batch = [place if place == Shard(0) else Replicate() for place in places]
    one = scores.clone().requires_grad_()
    other = distribute_tensor(scores, mesh, places).requires_grad_()
    expected = F.cross_entropy(one, target, weight, ignore_index=IGNORED, **options)
    (slope,) = torch.autograd.grad((expected * expected).sum(), one)
    placed = None if weight is None else distribute_tensor(weight, mesh, everywhere)
    with loss_parallel() if inside else contextlib.nullcontext():
        found = F.cross_entropy(other, distribute_tensor(target, mesh, batch), placed, ignore_index=IGNORED, **options)
        if inside and any(a.is_partial() and b == Shard(1) for a, b in zip(found.placements, places, strict=True)):
            return float("inf")
        (ours,) = torch.autograd.grad((found * found).sum(), other)
    return worst([found, ours], [expected, slope])


def _all():
    import holdfast.spmd

    holdfast.spmd.enable()
    findings = Findings()
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    ways = ((line, [Shard(1)]), (square, [Shard(0), Shard(1)]), (square, [Shard(1), Shard(1)]))
    for (mesh, places), classes, smoothing in itertools.product(ways, (13, 3), (0.0, 0.1)):
        for reduction, weighted, inside in itertools.product(("mean", "sum", "none"), (False, True), (False, True)):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            findings.check(
                f"{places} {classes} {options} {weighted} {inside}",
                lambda m=mesh, p=places, c=classes, o=options, w=weighted, i=inside: _once(m, p, c, o, w, i),
            )
    return findings.count, findings.bad


@pytest.mark.full
def test_every_reduction_weight_and_smoothing():
    for count, bad in run_ranks(4, _all, deadline_s=240):
        assert (count, bad) == (144, {})


def _bytes():
    """What one loss moves, forward and backward, before and after `enable`."""
    import holdfast.spmd

    mesh = init_device_mesh("cpu", (4,))
    target = torch.arange(64) % 32
    moved = []
    for enabled in (False, True):
        holdfast.spmd.enable() if enabled else holdfast.spmd.disable()
        scores = distribute_tensor(draw(torch.Generator().manual_seed(0), 64, 32), mesh, [Shard(1)]).requires_grad_()
        with Listener() as listener, loss_parallel():
            F.cross_entropy(scores, target).backward()
        moved.append(listener.bytes)
    return moved


def test_loss_parallel_moves_no_more_than_torchs():
    for torchs, ours in run_ranks(4, _bytes, deadline_s=120):
        assert 0 < ours <= torchs
