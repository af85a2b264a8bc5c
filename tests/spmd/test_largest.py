"""A dim that several mesh axes cut, reshaped so that not all can stay: the largest is kept, the others are gathered."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks

WHOLE, ROWS = Replicate(), Shard(0)  # None below: where the largest cannot stay, it is left to torch


def _split() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    wrong = []
    for sizes, kept in (((2, 3), (WHOLE, ROWS)), ((3, 2), (ROWS, WHOLE))):
        mesh = init_device_mesh("cpu", sizes)
        for shape, expected in (((3, 4, 4), kept), ((6, 2, 4), (ROWS, ROWS)), ((4, 3, 4), None)):
            x = torch.arange(48.0).reshape(12, 4)
            placed = distribute_tensor(x, mesh, [ROWS, ROWS]).requires_grad_()
            out = placed.view(shape) * 2
            out.sum().backward()
            if expected not in (None, tuple(out.placements)) or not torch.equal(out.full_tensor(), x.view(shape) * 2):
                wrong.append(f"{sizes} {shape}: {out.placements}")
            if not torch.equal(placed.grad.full_tensor(), torch.full_like(x, 2)):
                wrong.append(f"{sizes} {shape}: gradient")
            with torch.no_grad():
                placed.view(shape)[0].zero_()  # still a view that writes through
            x.view(shape)[0].zero_()
            if not torch.equal(placed.detach().full_tensor(), x):
                wrong.append(f"{sizes} {shape}: write")
    return wrong


def test_a_reshape_keeps_the_largest_axis_that_it_can():
    for wrong in run_ranks(6, _split, deadline_s=90):
        assert not wrong
