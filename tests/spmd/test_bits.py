"""view(dtype): the bits of one device, however the tensor lies, and whatever dtype was asked for before."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks

DTYPES = (torch.int32, torch.int64, torch.float32)


def _views() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (4,)), []
    for kind in (torch.float64, torch.float32):
        for columns in (6, 8):
            whole = torch.arange(4 * columns).reshape(4, columns).to(kind)
            parts = {str(place): distribute_tensor(whole, mesh, [place]) for place in (Replicate(), Shard(0), Shard(1))}
            parts["a sum"] = DTensor.from_local(whole / 4, mesh, [Partial()])
            for name, part in parts.items():
                for dtype in DTYPES:
                    if not torch.equal(part.view(dtype).full_tensor(), whole.view(dtype)):
                        wrong.append(f"{kind} of {columns} columns as {dtype}: {name}")
    rows = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    rows.view(torch.int32)[1] = 0
    return wrong if rows.full_tensor().sum() == 18 else [*wrong, "a write through it"]


def test_the_bits_of_a_dtensor_are_those_of_one_device():
    assert run_ranks(4, _views, deadline_s=180) == [[]] * 4
