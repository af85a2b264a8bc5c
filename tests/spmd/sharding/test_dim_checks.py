"""Arguments that one device refuses: the same error on every rank, also where a rank's part is empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from holdfast.spmd.base.call import Call
from holdfast.spmd.sharding.dim_checks import check_dims
from tests.dist.harness import run_ranks
from tests.spmd.judge import place

REDUCED = "argmax argmin amax amin max min mean var std sum prod logsumexp softmax log_softmax median"
SCANNED = "cumsum cumprod cummax cummin logcumsumexp sort unbind"
CALLS: dict[str, Callable[[Any, int], Any]] = {
    **{name: lambda x, dim, name=name: getattr(torch, name)(x, dim) for name in (*REDUCED.split(), *SCANNED.split())},
    "inf norm": lambda x, dim: torch.linalg.vector_norm(x, float("inf"), dim=dim),
    "flip": lambda x, dim: x.flip([dim]),
    "roll": lambda x, dim: x.roll(1, dim),
    "cat": lambda x, dim: torch.cat([x, x], dim),
    "stack": lambda x, dim: torch.stack([x, x], dim),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "select": lambda x, dim: x.select(dim, 0),
    "slice": lambda x, dim: torch.ops.aten.slice.Tensor(x, dim, 0, 2),
    "topk": lambda x, dim: x.topk(1, dim),
    "squeeze_": lambda x, dim: x.clone().squeeze_(dim),
}
TWICE: dict[str, Callable[[Any], Any]] = {
    "flip": lambda x: x.flip([0, -2]),
    "amax": lambda x: x.amax((0, 0)),
    "mean": lambda x: x.mean((1, -1)),
    "logsumexp": lambda x: x.logsumexp((0, -2)),
}
SIZES = ((3, 1), (4, 6))


def _error(call: Callable[..., Any], *tensors: Any) -> str:
    try:
        call(*tensors)
    except (IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _dims() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    calls = {f"{name} {dim}": lambda x, run=run, dim=dim: run(x, dim) for name, run in CALLS.items() for dim in (2, -5)}
    calls |= {f"{name} twice": run for name, run in TWICE.items()}
    for shape in SIZES:
        x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for places in (Replicate(), Shard(0), Shard(1), Partial()):
            for name, run in calls.items():
                found, expected = _error(run, place(x, mesh, (places,))), _error(run, x)
                if found.partition(":")[0] != expected.partition(":")[0]:
                    wrong.append(f"{name} {shape} {places}: {found}, not {expected}")
    return wrong


def test_dims_that_one_device_refuses_are_refused_on_every_rank():
    assert run_ranks(2, _dims, deadline_s=180) == [[], []]


SHAPES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "bias of another length": (F.conv2d, ((2, 4, 5, 5), (6, 4, 2, 2), (7,))),
    "bias of a transposed one": (F.conv_transpose2d, ((2, 4, 5, 5), (4, 6, 2, 2), (7,))),
    "values that do not fit": (lambda x, v: x.index_put((_rows(x),), v), ((8, 4), (16, 6))),
    "rows that do not fit": (lambda x, v: x.index_put((_rows(x),), v), ((4, 2), (3, 2))),
    "a table of three dims": (lambda x, _: F.embedding(_rows(x), x), ((4, 1, 2), (1,))),
}


def _rows(x: Any) -> Any:
    rows = torch.tensor([0, 3])
    return place(rows, x.device_mesh, (Replicate(),)) if hasattr(x, "device_mesh") else rows


def _shapes() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (4,)), []
    for name, (run, shapes) in SHAPES.items():
        tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in shapes]
        for places in (Replicate(), Shard(0), Shard(1), Partial()):
            first, *others = tensors
            placed = [place(first, mesh, (places,)), *(place(other, mesh, (Replicate(),)) for other in others)]
            found, expected = _error(run, *placed), _error(run, *tensors)
            if found.partition(":")[0] != expected.partition(":")[0]:
                wrong.append(f"{name} {places}: {found}, not {expected}")
    return wrong


def test_shapes_that_one_device_refuses_are_refused_on_every_rank():
    assert run_ranks(4, _shapes, deadline_s=180) == [[]] * 4


@pytest.mark.parametrize(
    ("op", "values"),
    [
        (torch.ops.aten.unsqueeze_.default, (torch.zeros(3, 4), 2)),
        (torch.ops.aten.diag_embed.default, (torch.zeros(3, 4), 0, -2, 2)),
        (torch.ops.aten.roll.default, (torch.zeros(3, 4), [1, 1], [0, 0])),
        (torch.ops.aten.cat.default, ([torch.zeros(0), torch.zeros(3, 4)], 1)),
        (torch.ops.aten.slice_backward.default, (torch.zeros(3), [9, 3], 1, 0, 3, 1)),
        (torch.ops.aten.cumsum.default, (torch.zeros(()), -1)),
        (torch.ops.aten.sum.dim_IntList, (torch.zeros(3), None)),
    ],
)
@pytest.mark.raises_nothing
def test_dims_that_one_device_takes_pass(op, values):
    check_dims(Call(op, values, None))
