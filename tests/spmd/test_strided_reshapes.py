"""Reshapes of strided shards, of flattened columns and of FSDP2 with TP: torch takes some of them for plain shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.spmd.base.torch_versions import is_torch_2_11
from tests.dist.harness import run_ranks

WHOLES = [(8, 6), (8, 5), (6, 3), (2, 3)]


def _shapes(size: int) -> list[tuple[int, ...]]:
    """Return every shape of up to three dims."""
    divisors = [count for count in range(1, size + 1) if size % count == 0]
    threes = [(a, b, size // a // b) for a in divisors for b in divisors if size // a % b == 0]
    return [(size,), *((count, size // count) for count in divisors), *threes]


def _wrong(rows: int, columns: int) -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(float(rows * columns)).reshape(rows, columns)
    wrong = []
    for shape in _shapes(rows * columns):
        leaf = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
        found = leaf.reshape(-1).view(shape)
        if not torch.equal(found.full_tensor(), whole.reshape(shape)):
            wrong.append(f"{shape}")
        (found * found).sum().backward()
        if leaf.grad is None or not torch.equal(leaf.grad.full_tensor(), 2 * whole):  # type: ignore[attr-defined]
            wrong.append(f"gradient of {shape}")
    return wrong


def _wrong_rows() -> list[str]:
    """Return the reshapes of strided rows with other numbers than one device's, or sent where no rank needs more."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, whole, wrong = init_device_mesh("cpu", (3,)), torch.arange(48.0).reshape(24, 2), []
    for factor in (2, 4):
        rows = DTensor.from_local(_own_rows(whole, factor), mesh, [_StridedShard(0, split_factor=factor)])
        for shape in _shapes(48):
            with CommDebugMode() as sent:
                found = rows.view(shape)
            if not torch.equal(found.full_tensor(), whole.view(shape)):
                wrong.append(f"{shape} with factor {factor}")
            if shape[0] % (3 * factor) == 0 and sent.get_total_counts():
                wrong.append(f"{shape} with factor {factor} sends")
    return wrong


def _own_rows(whole: torch.Tensor, factor: int) -> torch.Tensor:
    """Return this rank's rows: its third of each of `factor` blocks."""
    return torch.cat([block.chunk(3)[dist.get_rank()] for block in whole.chunk(factor)])


PARAMETERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flattened columns": lambda w: w.t().flatten(),
    "viewed columns": lambda w: w.t().contiguous().view(-1),
    "split and merged": lambda w: w.t().unflatten(1, (4, 3)).flatten(0, 1),
    "repeated": lambda w: w.t().repeat(2, 1).flatten(),
    "stacked": lambda w: torch.stack([w.t(), w.t()], 1).flatten(1),
    "expanded": lambda w: w.expand(3, 12, 5).reshape(36, 5),
    "permuted": lambda w: w[None].expand(2, 12, 5).permute(0, 2, 1).flatten(1),
    "viewed again": lambda w: w.t().flatten().view(5, 12).sum(1),
    "pieces of another size": lambda w: w.view(6, 2, 5),
}
KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flattened": lambda w: w.flatten(),
    "split at its factor": lambda w: w.view(2, 6, 5),
    "split in pieces": lambda w: w.view(4, 3, 5),
}


def _wrong_parameters() -> list[str]:
    """Return the views of a parameter of FSDP2 with TP with other numbers, or sent where no rank needs more."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    whole = torch.arange(60.0).view(12, 5)
    layer = torch.nn.Linear(5, 12)
    layer.weight.data.copy_(whole)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    weight = layer.weight.detach()
    for name, view in {**PARAMETERS, **KEPT}.items():
        with CommDebugMode() as sent:
            found = view(weight)
        if not torch.equal(found.full_tensor(), view(whole)):  # type: ignore[attr-defined]
            wrong.append(name)
        if name in KEPT and sent.get_total_counts() and not is_torch_2_11():  # which gathers more
            wrong.append(f"{name} sends")
    return wrong


@pytest.mark.timeout(120)
def test_parameters_of_fsdp_with_tp_reshape_as_on_one_device() -> None:
    assert run_ranks(4, _wrong_parameters, deadline_s=100) == [[]] * 4


def _wrong_merged() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(180.0).view(6, 5, 6)
    views = {
        "merged twice": lambda x: x.flatten(0, 1).flatten(),
        "and split": lambda x: x.flatten(0, 1).flatten().view(6, -1),
        "repeated": lambda x: x.flatten(0, 1)[:, None].expand(-1, 3, -1).flatten(0, 1),
    }
    leaves = {name: distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_() for name in views}
    found = {name: view(leaves[name]) for name, view in views.items()}
    wrong = [name for name, view in views.items() if not torch.equal(found[name].full_tensor(), view(whole))]
    for name, leaf in leaves.items():
        found[name].sum().backward()
        times = 3 if name == "repeated" else 1
        if leaf.grad is None or not torch.equal(leaf.grad.full_tensor(), torch.full_like(whole, times)):  # type: ignore[attr-defined]
            wrong.append(f"gradient, {name}")
    return wrong


@pytest.mark.timeout(120)
def test_uneven_columns_that_were_merged_reshape_as_on_one_device() -> None:
    assert run_ranks(2, _wrong_merged, deadline_s=100) == [[], []]


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.skipif(is_torch_2_11(), reason="torch 2.11 cannot redistribute a strided shard alone")
def test_strided_rows_reshape_as_on_one_device() -> None:
    assert run_ranks(3, _wrong_rows, deadline_s=100) == [[]] * 3


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("rows", "columns"), WHOLES)
def test_flattened_columns_reshape_as_on_one_device(rows: int, columns: int) -> None:
    assert run_ranks(2, _wrong, rows, columns, deadline_s=100) == [[], []]
