"""Eager dispatch of the 20 commonest operators on DTensors, with holdfast.spmd and without: a table of ratios.

The group is torch's fake one, so that nothing is measured but dispatch; each operator is timed in turns, with and
without, and the fastest turn of each counts: on a shared machine noise only ever slows a turn. `TURNS` may be given.
"""

from __future__ import annotations

import argparse
import statistics
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

CALLS = 100
TURNS = 60
AGAIN = 3
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
    """Microseconds of this thread per call: what others do on the machine is not counted."""
    began = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - began) / CALLS * 1e6


def measure(calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, dict[bool, list[float]]]:
    """Microseconds per call of each operator, without (False) and with (True), one of each per turn."""
    times: dict[str, dict[bool, list[float]]] = {name: {False: [], True: []} for name in calls}
    for turn in range(turns):
        for on in (False, True) if turn % 2 else (True, False):  # neither is always the warmer
            holdfast.spmd.enable() if on else holdfast.spmd.disable()
            for name, call in calls.items():
                for _ in range(5):  # decisions are made anew after the switch
                    call()
                times[name][on].append(timed(call))
    holdfast.spmd.disable()
    return times


def ratio(times: dict[bool, list[float]]) -> float:
    """With over without: the fastest turns, which noise can only have slowed."""
    return min(times[True]) / min(times[False])


def slow(times: dict[str, dict[bool, list[float]]]) -> list[str]:
    """The operators above the limit."""
    return [name for name, of in times.items() if ratio(of) > LIMIT]


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.spmd", description=__doc__)
    parser.add_argument("turns", nargs="?", type=int, default=TURNS, help="how often each operator is timed each way")
    turns = parser.parse_args().turns
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    calls = operators()
    times = measure(calls, turns)
    for _ in range(AGAIN):  # more turns for what seems slow: noise goes away with more of them, a cost stays
        for name, more in measure({name: calls[name] for name in slow(times)}, turns).items():
            for on in more:
                times[name][on] += more[on]
    dist.destroy_process_group()
    print(f"torch {torch.__version__}; at least {turns} turns of {CALLS} calls each way")
    print(f"{'':12}{'fastest turn, us':>24}{'':8}{'median turn, us':>24}")
    print(f"{'operator':12}{'torch':>12}{'with':>12}{'ratio':>8}{'torch':>12}{'with':>12}{'ratio':>8}")
    for name, of in times.items():
        middle = {on: statistics.median(of[on]) for on in of}
        print(
            f"{name:12}{min(of[False]):>12.1f}{min(of[True]):>12.1f}{ratio(of):>8.3f}"
            f"{middle[False]:>12.1f}{middle[True]:>12.1f}{middle[True] / middle[False]:>8.3f}"
        )
    ratios = [ratio(of) for of in times.values()]
    over = slow(times)
    print(f"median of the ratios {statistics.median(ratios):.3f}, largest {max(ratios):.3f}; limit {LIMIT}")
    print(f"above the limit: {', '.join(over) or 'none'}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
