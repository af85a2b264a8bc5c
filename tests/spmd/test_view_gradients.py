"""Gradients of results of which a program uses some only, and of dims that it counts from the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "select last dim": lambda x: x.select(-1, 1),
    "select last of last dim": lambda x: x.select(-1, -1),
    "select first dim": lambda x: x.select(-2, 1),
    "split": lambda x: x.split(2, -1)[0],
    "split by sizes": lambda x: x.split([1, 5], 1)[1],
    "chunk": lambda x: x.chunk(2)[0],
    "unbind": lambda x: x.unbind(-1)[0],
    "trapezoid": lambda x: torch.trapezoid(x, dim=-1),
    "split_copy": lambda x: torch.ops.aten.split_copy.Tensor(x, 2, -1)[0],
    "unbind_copy": lambda x: torch.ops.aten.unbind_copy.int(x, -1)[0],
    "stack last": lambda x: torch.stack([x, 2 * x], -1),
    "stack before last": lambda x: torch.stack([x, 2 * x], -2),
    "max": lambda x: x.max(-2)[0],
    "squeeze": lambda x: x.squeeze(-2),  # of 2 rows each rank has one
    "squeeze both": lambda x: x.squeeze((-1, -2)),
}


def _wrong(rows: int) -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    whole = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, call in CALLS.items():
        expected = whole.clone().requires_grad_()
        call(expected).pow(2).sum().backward()
        for place in (Shard(0), Shard(1), Replicate()):
            found = distribute_tensor(whole, mesh, [place]).requires_grad_()
            call(found).pow(2).sum().backward()
            if found.grad is None or not torch.allclose(found.grad.full_tensor(), expected.grad):  # type: ignore[attr-defined]
                wrong.append(f"{name} {place}")
    return wrong


@pytest.mark.sliced(3)
@pytest.mark.parametrize("rows", [2, 4, 5])
def test_gradients_are_those_of_one_device(rows: int) -> None:
    assert run_ranks(2, _wrong, rows, deadline_s=120) == [[], []]
