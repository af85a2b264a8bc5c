"""Even shards that torch 2.13 does right: its decision is taken, and cached as with torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from holdfast.spmd.base import torch_dispatch
from holdfast.spmd.base.torch_versions import AT_LEAST_2_13
from tests.dist.harness import run_ranks
from tests.spmd.judge import place

KERNEL = torch.arange(36, dtype=torch.float64).view(2, 2, 3, 3)

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "conv2d": F.conv2d,
    "max_pool2d": lambda x, _: F.max_pool2d(x, 2),
    "group_norm": lambda x, _: F.group_norm(x, 2),
    "argmax": lambda x, _: x.argmax(1),
}


def _count_calls() -> list[Any]:
    """Return a list that gets an entry for every call that is asked about from now on."""
    route, asked = torch_dispatch.slow_path(), list[Any]()

    def counted(*args: Any) -> Any:
        asked.append(args[0])
        return route(*args)

    torch_dispatch.override(torch_dispatch.SLOW_PATH, counted)
    return asked


def _asked() -> dict[str, dict[str, int]]:
    """How often the slow path is asked in three calls, by operation and how its input lies."""
    import holdfast.spmd

    holdfast.spmd.enable()
    asked = _count_calls()
    mesh, counts = init_device_mesh("cpu", (2,)), {}
    kernel = place(KERNEL, mesh, (Replicate(),))
    inputs = {"even": (4, Shard(0)), "uneven": (3, Shard(0)), "a sum": (4, Partial())}
    for name, call in CALLS.items():
        counts[name] = {}
        for word, (rows, where) in inputs.items():
            whole = torch.randn(rows, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            x = place(whole, mesh, (where,))
            asked.clear()
            results: list[DTensor] = [call(x, kernel) for _ in range(3)]
            counts[name][word] = len(asked)
            torch.testing.assert_close(results[2].full_tensor(), call(whole, KERNEL))
    holdfast.spmd.disable()
    return counts


@pytest.mark.skipif(not AT_LEAST_2_13, reason="before 2.13 the rules decide about even shards too")
def test_even_shards_are_asked_about_once():
    for counts in run_ranks(2, _asked, deadline_s=120):
        assert {name: (asked["even"], asked["uneven"]) for name, asked in counts.items()} == dict.fromkeys(
            CALLS, (1, 3)
        )


def _numbers() -> list[float]:
    """Add a number and a 0-dim tensor to a Partial, each before and after the other."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, found = init_device_mesh("cpu", (2,)), []
    for dtype in (torch.float32, torch.float64):
        for order in ((0, 1, 0), (1, 0, 1)):
            torch_dispatch.clear_decision_caches()
            partial = DTensor.from_local(torch.ones(3, dtype=dtype), mesh, [Partial()])
            other = (0.5, torch.tensor(0.5, dtype=dtype))
            found += [(partial + other[which]).full_tensor()[0].item() for which in order]
    return found


def test_a_number_and_a_tensor_beside_a_partial_share_no_decision() -> None:
    assert run_ranks(2, _numbers, deadline_s=120) == [[2.5] * 12] * 2


def _asked_by_losses() -> int:
    """How often the slow path is asked in the third of three backward passes from a Partial."""
    import holdfast.spmd

    holdfast.spmd.enable()
    x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    for _ in range(2):  # the second adds to the first gradient
        x.sum().backward()
    asked = _count_calls()
    x.sum().backward()
    holdfast.spmd.disable()
    return len(asked)


def test_the_backward_of_a_partial_loss_is_decided_once() -> None:
    assert run_ranks(2, _asked_by_losses, deadline_s=60) == [0, 0]
