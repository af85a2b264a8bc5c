"""Eager dispatch of the 20 commonest operators on DTensors, with holdfast.spmd and without: a table of ratios.

The group is torch's fake one, so that nothing is measured but dispatch; each operator is timed in turns, with and
without, and the best turn of each counts.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast.spmd

CALLS = 300
TURNS = 15
LIMIT = 1.05


def operators() -> dict[str, Callable[[], Any]]:
    """The calls: inputs are small, so that the kernel hardly counts."""
    mesh = init_device_mesh("cpu", (4,))

    def place(*shape: int, where: Any = None) -> DTensor:
        return DTensor.from_local(torch.rand(*shape), mesh, [where or Shard(0)], run_check=False)

    x, y, square = place(4, 16), place(4, 16), place(16, 16, where=Replicate())
    heads, norm = place(2, 4, 8, 8), place(16, where=Replicate())
    ids = DTensor.from_local(torch.randint(0, 16, (4, 4)), mesh, [Shard(0)], run_check=False)
    mask = DTensor.from_local(torch.rand(4, 16) > 0.5, mesh, [Shard(0)], run_check=False)
    return {
        "add": lambda: x + y,
        "mul": lambda: x * y,
        "mul scalar": lambda: x * 2.0,
        "div": lambda: x / y,
        "mm": lambda: x @ square,
        "linear": lambda: F.linear(x, square, norm),
        "bmm": lambda: torch.matmul(heads, heads),
        "view": lambda: heads.view(8, 4, 64),
        "transpose": lambda: heads.transpose(1, 2),
        "slice": lambda: x[:, 2:6],
        "cat": lambda: torch.cat([x, y], 1),
        "sum": lambda: x.sum(-1),
        "mean": lambda: x.mean(-1),
        "softmax": lambda: x.softmax(-1),
        "gelu": lambda: F.gelu(x),
        "silu": lambda: F.silu(x),
        "layer_norm": lambda: F.layer_norm(x, (16,), norm, norm),
        "embedding": lambda: F.embedding(ids, square),
        "where": lambda: torch.where(mask, x, y),
        "add_": lambda: x.add_(y, alpha=0.0),
    }


def timed(call: Callable[[], Any]) -> float:
    """Microseconds per call."""
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS * 1e6


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    calls = operators()
    best = {name: {False: float("inf"), True: float("inf")} for name in calls}
    for turn in range(2 * TURNS):
        on = bool(turn % 2)
        holdfast.spmd.enable() if on else holdfast.spmd.disable()
        for name, call in calls.items():
            for _ in range(5):  # decisions are made anew after the switch
                call()
            best[name][on] = min(best[name][on], timed(call))
    holdfast.spmd.disable()
    print(f"{'operator':12}{'torch us':>10}{'with us':>10}{'ratio':>8}")
    ratios = []
    for name, times in best.items():
        ratios.append(times[True] / times[False])
        print(f"{name:12}{times[False]:>10.1f}{times[True]:>10.1f}{ratios[-1]:>8.3f}")
    together = sum(times[True] for times in best.values()) / sum(times[False] for times in best.values())
    print(f"together {together:.3f}; limit {LIMIT}")
    dist.destroy_process_group()
    return 0 if together <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
