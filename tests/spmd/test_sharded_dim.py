"""Work along the sharded dim itself: what one device gives, for far fewer bytes than the tensor has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from holdfast.spmd.base.torch_versions import AT_LEAST_2_13
from tests.dist.harness import run_ranks
from tests.spmd.judge import Listener, place

ROWS, COLUMNS = 64, 66
ROW = COLUMNS * 8  # the bytes of one
WHOLE = ROWS * ROW * 3 // 4  # what a rank receives to gather the tensor

FEW = torch.tensor([7, 63, -64, 20, -1])


@dataclass(frozen=True, slots=True)
class Asked:
    """A call on a tensor whose rows are sharded, and the bytes that a rank may receive, there and back."""

    run: Callable[[Any], Any]
    bytes: int
    dim: int = 0
    tensors: int = 1  # that would be gathered


def _other(x: Any, dim: int = 0) -> Any:
    """Two rows, or columns, that every rank has."""
    rows = torch.arange(2 * x.shape[1 - dim], dtype=x.dtype).view(2, -1)
    return _beside(rows if dim == 0 else rows.t().contiguous(), x)


def _rows(x: Any) -> Any:
    return _beside((torch.arange(2 * COLUMNS).view(2, COLUMNS) * 7) % ROWS, x)


def _beside(whole: torch.Tensor, x: Any) -> Any:
    return place(whole, x.device_mesh, (Replicate(),)) if isinstance(x, DTensor) else whole


def _doubled(x: Any) -> Any:
    return x


def _twice(x: Any) -> Any:
    """What reads its argument two times."""
    return x.abs() + x * x


CALLS: dict[str, Asked] = {
    "tril of rows": Asked(lambda x: x.tril(2), 0),
    "triu of columns": Asked(lambda x: x.triu(-3), 0, dim=1),
    "tril_ of rows": Asked(lambda x: x.clone().tril_(), 0),
    "x[i]": Asked(lambda x: x[FEW], 2 * 5 * ROW),
    "x[:, i]": Asked(lambda x: x[:, FEW], 2 * 5 * ROWS * 8, dim=1),
    "x[[i]]": Asked(lambda x: x[FEW[:4].view(2, 2)], 2 * 4 * ROW),
    "index_select": Asked(lambda x: x.index_select(0, FEW[:2]), 2 * 2 * ROW),
    "gather": Asked(lambda x: x.gather(0, FEW[:2, None].expand(2, COLUMNS)), 2 * 2 * ROW),
    "gather of one": Asked(lambda x: _twice(x.gather(1, _rows(x).view(-1)[:ROWS, None])), 6 * ROWS * 8, dim=1),
    "index_add": Asked(lambda x: x.index_add(0, FEW[:2], _other(x)), 0),
    "index_add_": Asked(lambda x: x.clone().index_add_(1, FEW[:2], _other(x, 1), alpha=3), 0, dim=1),
    "index_copy": Asked(lambda x: x.index_copy(0, FEW[:2], _other(x)), 0),
    "index_fill": Asked(lambda x: x.index_fill(0, FEW, 3), 0),
    "index_fill_": Asked(lambda x: x.clone().index_fill_(1, FEW, 3), 0, dim=1),
    "scatter": Asked(lambda x: x.scatter(0, _rows(x), 3), 0),
    "scatter of rows": Asked(lambda x: x.scatter(0, _rows(x), _other(x)), 0),
    "scatter_add": Asked(lambda x: x.scatter_add(0, _rows(x), _other(x)), 0),
    "scatter_add_": Asked(lambda x: x.clone().scatter_add_(0, _rows(x), _other(x)), 0),
    "scatter_reduce": Asked(lambda x: x.scatter_reduce(0, _rows(x), _other(x), "sum", include_self=False), 2 * 2 * ROW),
    "scatter_reduce amax": Asked(lambda x: x.detach().scatter_reduce(0, _rows(x), _other(x), "amax"), 0),
    "flip": Asked(lambda x: x.flip(0), 2 * ROWS // 4 * ROW),
    "flip both": Asked(lambda x: x.flip(-1, 0), 2 * ROWS // 4 * ROW),
    "roll": Asked(lambda x: x.roll(1, 0), 2 * ROW),
    "roll both": Asked(lambda x: x.roll((-3, 5, 1), (1, 0, 1)), 2 * 2 * ROWS * 8, dim=1),
    "x[3:9]": Asked(lambda x: x[3:9], 3 * 6 * ROW),
    "x[1:]": Asked(lambda x: x[1:], 2 * 2 * ROW),
    "x[:, :-1]": Asked(lambda x: x[:, :-1], 2 * 4 * ROWS * 8, dim=1),
    "x[::2]": Asked(lambda x: x[::2], 2 * 6 * ROW),
    "x[7]": Asked(lambda x: x[7], 3 * ROW),
    "x[:, -1]": Asked(lambda x: x[:, -1], 3 * ROWS * 8, dim=1),
    "cat": Asked(lambda x: torch.cat([x, x * 2]), WHOLE, tensors=2),
    "cat of unequals": Asked(lambda x: torch.cat([x, x[:, :21], x], -1), WHOLE * 8 // 5, dim=1, tensors=3),
    "cat of many": Asked(lambda x: torch.cat([x, x, x, x]), 2 * WHOLE, tensors=4),
    "triu of a stack": Asked(lambda x: x.view(ROWS, 6, 11).triu(1), 0),
}


def _findings() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(5)
    wrong = []
    for name, asked in CALLS.items():
        for dtype in (torch.float64, torch.int64):
            whole = (torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64) * 9).to(dtype)
            wrong += [f"{name} {dtype}: {problem}" for problem in _problems(asked, whole, mesh)]
    return wrong


def _problems(asked: Asked, whole: torch.Tensor, mesh: Any) -> list[str]:
    live = whole.is_floating_point()
    expected, found = whole.clone().requires_grad_(live), place(whole, mesh, (Shard(asked.dim),)).requires_grad_(live)
    listener = Listener()
    theirs = asked.run(expected)
    with listener:
        ours = asked.run(found)
    if live and theirs.requires_grad:
        weight = torch.randn(theirs.shape, dtype=theirs.dtype, generator=torch.Generator().manual_seed(1))
        theirs.backward(weight)
        places = [p if isinstance(p, Shard) else Replicate() for p in ours.placements]
        with listener:
            ours.backward(place(weight, mesh, tuple(places)))
    assert isinstance(ours, DTensor)
    problems = [] if torch.allclose(ours.full_tensor(), theirs, rtol=1e-12, atol=0) else ["another result"]
    if found.grad is not None and not torch.allclose(found.grad.full_tensor(), expected.grad):
        problems.append("another gradient")
    if listener.bytes > asked.bytes and AT_LEAST_2_13:  # before, torch gathers more
        problems.append(f"{listener.bytes} bytes, more than {asked.bytes}")
    return problems


def test_far_less_than_the_tensor_is_sent():
    assert all(asked.bytes < asked.tensors * WHOLE for asked in CALLS.values())
    assert run_ranks(4, _findings, deadline_s=240) == [[]] * 4
