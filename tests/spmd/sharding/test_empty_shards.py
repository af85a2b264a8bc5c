"""A rank with an empty shard raises what the others raise, and adds nothing where they have a result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks

RANKS = 3  # of which the last has no row
WHOLES = (torch.ones(2, 4), torch.ones(2, 4, dtype=torch.int64), torch.ones(4, 3, dtype=torch.float64))
REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a product of two dtypes": lambda x, n, w: x @ w,
    "lerp of integers": lambda x, n, w: torch.lerp(n, n, n),
    "bits of floats": lambda x, n, w: torch.bitwise_and(x, x),
    "order of complex numbers": lambda x, n, w: n.to(torch.complex64).clamp(0, 1),
}


def _outcome(name: str) -> str:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (RANKS,))
    places = (Shard(0), Shard(0), Replicate())
    placed = [distribute_tensor(whole, mesh, [place]) for whole, place in zip(WHOLES, places, strict=True)]
    try:
        REFUSED[name](*placed)
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__
    return "returned"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", REFUSED)
def test_what_one_device_refuses_every_rank_refuses(name: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)) as refused:
        REFUSED[name](*WHOLES)
    assert run_ranks(RANKS, _outcome, name, deadline_s=100) == [refused.type.__name__] * RANKS


def _joined() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (RANKS,)), []
    whole = torch.arange(20.0).reshape(5, 4)
    x = distribute_tensor(whole, mesh, [Shard(1)])
    for place in (Replicate(), Shard(0), Partial()):
        for dtype in (torch.float32, torch.float64):
            nothing = DTensor.from_local(torch.empty(0, dtype=dtype), mesh, [place], run_check=False)
            for tensors in ([nothing, x], [x, nothing], [x, nothing, x]):
                found = torch.cat(tensors).full_tensor()
                expected = torch.cat([torch.empty(0, dtype=dtype) if t is nothing else whole for t in tensors])
                if found.dtype != expected.dtype or not torch.equal(found, expected):
                    wrong.append(f"{place} {dtype} {len(tensors)}")
    return wrong


@pytest.mark.timeout(120)
def test_cat_ignores_a_vector_without_elements() -> None:
    assert run_ranks(RANKS, _joined, deadline_s=100) == [[]] * RANKS
