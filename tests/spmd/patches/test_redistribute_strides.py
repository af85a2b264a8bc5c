"""What was transposed or expanded: its parts lie in memory as the strides say, also after it moved."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.spmd.cases import Case, cases_of
from tests.spmd.ops import all_operations
from tests.spmd.raises import reason
from tests.spmd.team import Team


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (4, 2)).transpose(1, 2)


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gradient of heads": lambda x, y: _heads(x).square().sum(),
    "gelu of heads": lambda x, y: F.gelu(_heads(x)).sum(),
    "product of heads": lambda x, y: (_heads(x) * _heads(y)).transpose(1, 2).view(x.shape).square().sum(),
    "product with the expanded": lambda x, y: (x[:, :1].expand(x.shape).mT * y.mT).mT.view(-1).square().sum(),
}
EVERY = 2999
CAUSAL = Case("sdpa_causal", "even", "2x2", ("R", "2"), "follow", "columns")  # no fused kernel takes it so
LEFT_OUT = (
    *(
        "view",
        "view_mul_",
        "LBFGS",
    ),  # of columns, which raises a RuntimeError on one device and torch's ValueError here
    "kron",  # views a product, which may lie otherwise on a rank with one row
)
PLACES = (Replicate(), Shard(0), Shard(1), Shard(2), Partial())


def _placed(whole: torch.Tensor, mesh: Any, place: Any) -> DTensor:
    if place.is_partial():
        return DTensor.from_local(whole / mesh.size(), mesh, [place]).requires_grad_()
    return distribute_tensor(whole, mesh, [place]).requires_grad_()


def _views(rows: int) -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (4,)), []
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, rows, 8, dtype=torch.float64, generator=draw) for _ in range(2))
    for (name, take), *places in itertools.product(CALLS.items(), PLACES, PLACES):
        leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        parts = [_placed(whole, mesh, place) for whole, place in zip((x, y), places, strict=True)]
        expected, found = take(*leaves), take(*parts)
        expected.backward()
        found.backward()
        pairs = [(found, expected), *((part.grad, leaf.grad) for part, leaf in zip(parts, leaves, strict=True))]
        if not all(ours is theirs or torch.allclose(ours.full_tensor(), theirs) for ours, theirs in pairs):
            wrong.append(f"{name} {places}")
    moved = _heads(_placed(x, mesh, Shard(1))).redistribute(mesh, [Replicate()]).transpose(1, 2).view(x.shape)
    return wrong if torch.equal(moved.full_tensor(), x) else [*wrong, "redistribute"]


@pytest.mark.full
@pytest.mark.parametrize("rows", [5, 8])
def test_a_transposed_tensor_that_moved_is_viewed_as_on_one_device(rows):
    assert run_ranks(4, _views, rows, deadline_s=180) == [[]] * 4


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_slice_of_the_table_by_columns() -> None:
    chosen = [operation for name, operation in all_operations().items() if name not in LEFT_OUT]
    cases = [case for operation in chosen if not operation.random for case in cases_of(operation)][::EVERY]
    with Team(enable=True, threads=True) as team:
        findings = list(team.find([*(replace(case, laid="columns") for case in cases), CAUSAL]))
    bad = [finding for finding in findings if not finding.is_right]
    assert [finding for finding in bad if not reason(finding.case.operation)] == []
