"""Values and meshes that the matrix has not: NaN, half precision, two meshes, ranks that have no part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast.spmd.base import torch_dispatch
from tests.dist.harness import run_ranks


def _enabled(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    import holdfast.spmd

    holdfast.spmd.enable()
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


EXTREMES = {
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "amax rows": lambda x: x.reshape(8, 1).amax(0),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "inf norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "-inf norm": lambda x: torch.linalg.vector_norm(x, float("-inf")),
    "clip": lambda x: nn.utils.clip_grad_norm_([_with_gradient(x)], 1.0, norm_type=float("inf")),
}


def _with_gradient(x: torch.Tensor) -> torch.Tensor:
    parameter = torch.zeros_like(x).requires_grad_()
    parameter.grad = x.clone()
    return parameter


def _nan() -> list[str]:
    mesh, wrong = _enabled((2,)), []
    for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for number in (float("nan"), -float("nan"), float("inf"), float("-inf"), 0.5, -0.0):
            for at in (0, 3, 7):
                whole = torch.arange(-4.0, 4.0).to(kind)
                whole[at] = number
                for name, take in EXTREMES.items():
                    found, expected = take(distribute_tensor(whole, mesh, [Shard(0)])).full_tensor(), take(whole)
                    if not torch.equal(found.nan_to_num(7e3), expected.nan_to_num(7e3)):
                        wrong.append(f"{name} {kind} {number} at {at}: {found}, not {expected}")
    return wrong


def test_a_nan_is_the_largest_and_the_smallest_as_on_one_device():
    assert run_ranks(2, _nan, deadline_s=180) == [[], []]


MEANS = {
    "mean": lambda x, y: x.mean(),
    "mean of rows": lambda x, y: x.mean(0),
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "cross_entropy": lambda x, y: F.cross_entropy(x * 20, _targets(x)),
}


def _targets(x: torch.Tensor) -> torch.Tensor:
    target = torch.zeros(x.shape[0], dtype=torch.int64)
    return distribute_tensor(target, x.device_mesh, x.placements) if isinstance(x, DTensor) else target


def _half() -> list[str]:
    mesh, wrong = _enabled((2,)), []
    for kind in (torch.float16, torch.bfloat16):
        x = torch.arange(7 * 4000).reshape(7, 4000).remainder(11).add(10).to(kind)
        for name, take in MEANS.items():
            leaf = x.clone().requires_grad_()
            placed = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
            expected, found = take(leaf, leaf.detach() * 0.5), take(placed, placed.detach() * 0.5)
            expected.sum().backward()
            found.sum().backward()
            for ours, theirs in ((found, expected), (placed.grad, leaf.grad)):
                if not torch.allclose(ours.full_tensor().float(), theirs.float(), rtol=2e-2, atol=1e-5):
                    wrong.append(f"{name} {kind}")
    return wrong


def test_means_in_half_precision_do_not_overflow_on_the_way():
    assert run_ranks(2, _half, deadline_s=180) == [[], []]


LARGE_MEANS = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0, keepdim=True),
    "l1_loss": lambda x: F.l1_loss(x, x * 0),
    "avg_pool2d": lambda x: F.avg_pool2d(x[None, None], 2),
}


def _large_means() -> list[str]:
    mesh, wrong = _enabled((2,)), []
    for rows in (8, 7):
        for name, take in LARGE_MEANS.items():
            x = torch.full((rows, 4), 40000.0, dtype=torch.float16)
            leaf, placed = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
            expected, found = take(leaf), take(placed)
            (expected / 4000).sum().backward()
            (found / 4000).sum().backward()
            for ours, theirs in ((found, expected), (placed.grad, leaf.grad)):
                if not torch.allclose(ours.full_tensor(), theirs, rtol=2e-3):
                    wrong.append(f"{name} {rows}: {ours.full_tensor().flatten()[0]}, not {theirs.flatten()[0]}")
    return wrong


def test_means_in_float16_are_finite_where_the_sum_of_two_is_not():
    assert run_ranks(2, _large_means, deadline_s=120) == [[], []]


def _two_meshes() -> list[str]:
    mesh = _enabled((2, 2), ("dp", "tp"))
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, 4, generator=draw) for _ in range(2))
    calls: dict[str, Any] = {
        "fmax": torch.fmax,
        "cdist": torch.cdist,
        "add": torch.add,
        "mse": F.mse_loss,
        "set": _set,
        "copy_": lambda a, b: a.clone().copy_(b),
    }
    wrong = []
    for here in ([Shard(0)], [Shard(1)]):
        for there in ([Shard(0)], [Shard(1)], [Replicate()]):
            for name, take in calls.items():
                found = take(distribute_tensor(x, mesh["dp"], here), distribute_tensor(y, mesh["tp"], there))
                if not torch.allclose(found.full_tensor(), take(x, y)):
                    wrong.append(f"{name} {here} {there}")
    return wrong


def _set(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a.clone()
    a[0:8] = b
    return a


def test_tensors_of_two_meshes():
    assert run_ranks(4, _two_meshes, deadline_s=180) == [[]] * 4


OUTSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 1),
    "amax": lambda x: x.amax(0),
    "argmax": lambda x: x.argmax(0),
    "rand_like": torch.rand_like,
    "cross_entropy": lambda x: F.cross_entropy(x, x.detach().argmax(1)),
    "svdvals": torch.linalg.svdvals,
    "histc": lambda x: x.detach().histc(4),
    "cdist": lambda x: torch.cdist(x, x),
    "prod": lambda x: x.prod(0),
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind(-1)[1],
    "relu_": lambda x: x.clone().relu_(),
    "foreach": lambda x: torch._foreach_mul([x, x], 2.0)[1],
}


def _outside() -> list[tuple[int, ...]]:
    """Ranks that are not in the mesh go through the same program, and have nothing to do."""
    _enabled((4,))
    mesh = DeviceMesh("cpu", [0, 1])
    shapes = []
    for call in OUTSIDE.values():
        placed = distribute_tensor(torch.arange(24.0).reshape(8, 3) + 1, mesh, [Shard(0)]).requires_grad_()
        found = call(placed)
        if found.requires_grad:
            found.pow(2).sum().backward()
            assert placed.grad is not None
        if mesh.get_coordinate() is not None:
            assert not found.full_tensor().isnan().any()  # type: ignore[attr-defined]
        shapes.append(tuple(found.shape))
    return shapes


def test_ranks_outside_of_the_mesh():
    plain = [tuple(call(torch.arange(24.0).reshape(8, 3) + 1).shape) for call in OUTSIDE.values()]
    assert run_ranks(4, _outside, deadline_s=180) == [plain] * 4


def _two_meshes_apart() -> dict[str, Any]:
    """Every rank is in one of two meshes, and calls with tensors of both."""
    _enabled((4,))
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    own = next(mesh for mesh in meshes if mesh.get_coordinate() is not None)
    both = [distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]) for mesh in meshes]
    mine = both[meshes.index(own)]
    torch._foreach_mul_(both, 6.0)
    doubled = torch._foreach_mul(both, 2.0)[meshes.index(own)]
    overflow = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(both, overflow, torch.tensor(0.5))
    other = both[1 - meshes.index(own)]
    return {
        "written": mine.full_tensor().unique().tolist(),
        "multiplied": doubled.full_tensor().unique().tolist(),
        "placed": [str(nn.Parameter(tensor).placements) for tensor in both],
        "in place": [tuple(other.clone().unsqueeze(0).squeeze_(0).shape), tuple(other.clone().relu_().shape)],
    }


def test_ranks_of_two_meshes_write_what_is_theirs():
    answer = {
        "written": [3.0],
        "multiplied": [12.0],
        "placed": [str((Shard(0),))] * 2,
        "in place": [(4, 3), (4, 3)],
    }
    assert run_ranks(4, _two_meshes_apart, deadline_s=120) == [answer] * 4


def _others() -> list[str]:
    mesh, wrong = _enabled((2,)), []
    table = torch.arange(12.0).reshape(6, 2)
    if not torch.equal(
        F.embedding(torch.tensor(3), distribute_tensor(table, mesh, [Shard(0)])).full_tensor(), table[3]
    ):
        wrong.append("one plain id")
    chances = distribute_tensor(torch.tensor([0.0, 1.0, 0.0, 1.0]), mesh, [Shard(0)])
    drawn = torch.empty_like(chances).bernoulli_(chances)
    if not torch.equal(drawn.full_tensor(), chances.full_tensor()):
        wrong.append("bernoulli_")
    for places in ([Shard(0)], [Replicate()]):
        y = distribute_tensor(torch.arange(4.0), mesh, places).requires_grad_()
        v = distribute_tensor(torch.ones(2), mesh, [Replicate()]).requires_grad_()
        written = y.square()
        written[0:2] = v
        (first,) = torch.autograd.grad(written.pow(3).sum(), y, create_graph=True)
        again = torch.autograd.grad(first.square().sum(), (y, v), allow_unused=True)
        if again[1] is not None and again[1].full_tensor().any():
            wrong.append(f"double backward {places}")
    return wrong


def test_a_plain_id_chances_and_the_gradient_of_a_gradient_of_a_write():
    assert run_ranks(2, _others, deadline_s=180) == [[], []]


def _norm_alone() -> bool:
    _enabled((1,))
    layer, plain = nn.SyncBatchNorm(3), nn.BatchNorm1d(3)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    return torch.equal(layer(x), plain(x))


def test_sync_batch_norm_on_one_rank():
    assert run_ranks(1, _norm_alone, deadline_s=120) == [True]


@pytest.mark.parametrize("name", ["cat.default", "gather.default"])
def test_another_librarys_handler_stays(name):
    import holdfast.spmd

    op, theirs = torch_dispatch.operator(name), lambda *_: None
    torch_dispatch.handlers()[op] = theirs
    try:
        holdfast.spmd.enable()
        holdfast.spmd.disable()
        assert torch_dispatch.handlers()[op] is theirs
    finally:
        torch_dispatch.handlers().pop(op, None)


def test_enable_within_loss_parallel_is_refused():
    from torch.distributed.tensor.parallel import loss_parallel

    import holdfast.spmd
    from holdfast.spmd.base.spmd_errors import SpmdArgumentError

    with loss_parallel(), pytest.raises(SpmdArgumentError, match="loss_parallel"):
        holdfast.spmd.enable()
