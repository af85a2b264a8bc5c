"""What runs on each rank: cases in, verdicts out."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests.spmd import elsewhere
from tests.spmd.cases import MESHES
from tests.spmd.judge import judge
from tests.spmd.ops import all_operations
from tests.spmd.together import decide_together


def rank_main(rank: int, world: int, folder: str, pipe: Any, enable: bool, device: str) -> None:
    """A rank that is a process."""
    _prepare(enable, device)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    _serve(pipe, device)


def host_main(world: int, pipes: list[Any], enable: bool, device: str) -> None:
    """A process whose threads are the ranks: no scheduler stands between them, so cases go many times faster."""
    from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

    _prepare(enable, device)
    sys.setswitchinterval(0.0005)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    ShardingPropagator._fake_mode_lock = threading.RLock()
    _install_threaded_pg()
    decide_together()
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
        _serve(pipes[rank], device)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _prepare(enable: bool, device: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if device == elsewhere.NAME:
        elsewhere.install()
    elif device != "cpu":
        torch.linalg.inv(
            torch.eye(1, device=device)
        )  # threads must not be the first: they would load the library twice
    if enable:
        import holdfast.spmd

        holdfast.spmd.enable()


def meshes_of_world(device: str = "cpu") -> dict[str, DeviceMesh]:
    """The meshes of the matrix, by name; collective."""
    names = ("a", "b")
    return {name: init_device_mesh(device, shape, mesh_dim_names=names[: len(shape)]) for name, shape in MESHES.items()}


def _serve(pipe: Any, device: str) -> None:
    meshes = meshes_of_world(device)
    operations = all_operations()
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            case = pipe.recv()
            other = meshes["2x2" if case.mesh == "4" else "4"]
            pipe.send(judge(case, operations[case.operation], meshes[case.mesh], other))
