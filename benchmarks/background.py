"""Saving in the background on CPU ranks: what the call costs, and when the checkpoint is published.

    make bench                       # or: python -m benchmarks.background --gigabytes 2

Every round does each contestant once, in turn, on the same bytes: one memory copy of the
rank's tensors, a plain write with fsync, a save in the background. Medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

SIDE = 4096
SETTLE_S = 1.0
TARGETS = {"save call / memory copy": 1.3, "published / plain write": 1.3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("out/background"))
    parser.add_argument("--json", type=Path, default=Path("out/bench_background.json"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    shutil.rmtree(arguments.folder, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env=environment, timeout=900)
    shutil.rmtree(arguments.folder, ignore_errors=True)


def run_rank(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import holdfast

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    count = round(arguments.gigabytes * 1e9 / (SIDE * SIDE * 4)) or 1
    locals_ = [torch.rand(SIDE // world, SIDE) for _ in range(count)]
    copies = [torch.zeros_like(tensor) for tensor in locals_]
    weights = {
        f"w{index}": DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for index, local in enumerate(locals_)
    }
    root: Path = arguments.folder
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        slowest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.setdefault(name, []).append(float(slowest))

    def settle() -> None:
        if rank == 0:
            os.sync()
            time.sleep(SETTLE_S)
        dist.barrier()

    def plain_write() -> None:
        descriptor = os.open(root / f"plain-{rank}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        for tensor in locals_:
            os.write(descriptor, memoryview(tensor.numpy().data).cast("B"))
        os.fsync(descriptor)
        os.close(descriptor)

    if rank == 0:
        root.mkdir(parents=True)
    dist.barrier()
    with holdfast.Checkpointer(root / "run") as checkpointer:
        checkpointer.prepare({"weights": weights})
        checkpointer.save(0, {"weights": weights}).result()
        for step in range(1, arguments.rounds + 1):
            settle()
            started = time.perf_counter()
            for target, source in zip(copies, locals_, strict=True):
                target.copy_(source)
            note("memory copy", time.perf_counter() - started)
            settle()
            started = time.perf_counter()
            plain_write()
            note("plain write", time.perf_counter() - started)
            if rank == 0:
                for path in root.glob("plain-*"):
                    path.unlink()
            settle()
            started = time.perf_counter()
            handle = checkpointer.save(step, {"weights": weights})
            note_call = time.perf_counter() - started
            handle.result()
            note("published", time.perf_counter() - started)
            note("save call", note_call)
            if rank == 0:
                shutil.rmtree(root / "run" / f"step-{step - 1:012d}")
    if rank == 0:
        report(arguments, seconds, count * SIDE * SIDE * 4)
    dist.destroy_process_group()


def report(arguments: argparse.Namespace, seconds: dict[str, list[float]], total_bytes: int) -> None:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\n{total_bytes / 1e9:.2f} GB, {arguments.ranks} ranks, {arguments.rounds} rounds, medians\n")
    for name, values in seconds.items():
        print(f"  {name:16} {median[name]:7.3f} s   ({min(values):.3f} to {max(values):.3f})")
    print()
    figures: dict[str, Any] = {}
    for name, target in TARGETS.items():
        over, under = name.split(" / ")
        figures[name] = median[over] / median[under]
        good = "ok" if figures[name] <= target else "MISSED"
        print(f"  {name:28} {figures[name]:6.2f}   wanted <= {target:g}   {good}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"bytes": total_bytes, "seconds": seconds, "figures": figures}
    arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
