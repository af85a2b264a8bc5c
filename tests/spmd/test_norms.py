"""Norms of negative order, where an empty shard has no smallest number, and norms in half precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.dist.harness import run_ranks


def _negative() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    x = torch.arange(1.0, 4.0).reshape(3, 1)
    for order in (-1.0, -2.0, float("-inf")):
        for shards in (Shard(0), Shard(1)):
            leaf, placed = x.clone().requires_grad_(), distribute_tensor(x, mesh, [shards]).requires_grad_()
            expected, found = (torch.linalg.vector_norm(tensor, order) for tensor in (leaf, placed))
            expected.backward()
            found.backward()
            (listed,) = torch._foreach_norm([placed.detach()], order)
            for ours, theirs in ((found, expected), (placed.grad, leaf.grad), (listed, expected)):
                if not torch.allclose(ours.full_tensor(), theirs):
                    wrong.append(f"{order} {shards}: {ours.full_tensor()}, not {theirs}")
    return wrong


def test_norms_of_negative_order_beside_an_empty_shard():
    assert run_ranks(2, _negative, deadline_s=120) == [[], []]


def _clipped(x: torch.Tensor, foreach: bool) -> torch.Tensor:
    parameter = torch.zeros_like(x).requires_grad_()
    parameter.grad = x.clone()
    nn.utils.clip_grad_norm_([parameter], 1.0, foreach=foreach)
    return parameter.grad


HALF_NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": lambda x: x.norm(),
    "order 3": lambda x: x.norm(3),
    "columns": lambda x: x.norm(dim=0),
    "list": lambda x: torch._foreach_norm([x])[0],
    "norm of norms": lambda x: torch.stack([x.norm(), x.norm()]).norm(),
    "total": lambda x: nn.utils.get_total_norm([x, x]),
    "clipped": lambda x: _clipped(x, foreach=True),
    "clipped one by one": lambda x: _clipped(x, foreach=False),
    "dist": lambda x: torch.dist(x, x * 0),
    "normalize": lambda x: F.normalize(x, dim=0),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x * 0.5, dim=0),
    "weight_norm": lambda x: torch._weight_norm(x, x[:1] * 0 + 1, 1),
}


def _half(shape: tuple[int, int]) -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    axes = torch.distributed.get_world_size() // 2
    mesh, places, wrong = init_device_mesh("cpu", (2,) * axes), [Shard(0), Shard(1)][:axes], []
    for kind in (torch.float16, torch.bfloat16):
        x = torch.arange(float(shape[0] * shape[1])).remainder(9).add(4).reshape(shape).to(kind)
        for name, take in HALF_NORMS.items():
            expected, found = take(x), take(distribute_tensor(x, mesh, places)).full_tensor()
            if not torch.allclose(found.double(), expected.double(), rtol=2 * torch.finfo(kind).eps, atol=0):
                wrong.append(f"{name} {kind}: {found.flatten()[0]}, not {expected.flatten()[0]}")
    return wrong


@pytest.mark.parametrize(("ranks", "shape"), [(2, (64, 64)), (2, (3001, 3)), (4, (301, 91))])
def test_norms_in_half_precision_are_reduced_in_float32(ranks: int, shape: tuple[int, int]) -> None:
    assert run_ranks(ranks, _half, shape, deadline_s=120) == [[]] * ranks


def _messages() -> list[int]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, counts = init_device_mesh("cpu", (2,)), []
    for kind in (torch.float16, torch.float32):
        tensors = [distribute_tensor(torch.ones(4, 3).to(kind), mesh, [Shard(0)]) for _ in range(5)]
        with CommDebugMode() as messages:
            nn.utils.get_total_norm(tensors).full_tensor()
            torch.stack([tensor.norm() for tensor in tensors]).norm().full_tensor()
        counts.append(messages.get_total_counts())
    return counts


def test_norms_in_half_precision_take_no_more_messages():
    assert run_ranks(2, _messages, deadline_s=120) == [[2, 2], [2, 2]]
