"""Save and load beside PyTorch's own checkpointing: 4 gloo ranks, one run, interleaved, as ratios.

    make bench                       # or: python -m benchmarks.save_load --gigabytes 2

Every round does each contestant once, in turn, on the same bytes; the table shows medians.
Plain write: each rank writes its share into a file of its own and syncs it.
Plain read: each rank copies its share from the mapped files into its tensors: what the machine can do.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SIDE = 4096
SETTLE_S = 1.0
POPULATE = getattr(mmap, "MAP_POPULATE", 0)
TARGETS = {
    "save row / plain write": ("<=", 1.1),
    "save column / plain write": ("<=", 1.15),
    "DCP HF consolidated / save row": (">=", 3.0),
    "dcp.load / load": (">=", 3.5),
    "dcp.load / load verified": (">=", 2.5),
    "dcp.load column / load column": (">=", 7.0),
    "dcp.load column / load column verified": (">=", 5.5),
    "read / needed, unverified": ("<=", 1.05),
    "read / touched blocks, verified": ("<=", 1.05),
    "load peak MB": ("<=", 256.0),
    "load column peak MB": ("<=", 256.0),
    "save row peak MB beyond one copy": ("<=", 256.0),
    "save column peak MB beyond one copy": ("<=", 256.0),
}
LIMITS = {
    "dcp.load / plain read": "dcp.load / load",
    "dcp.load column / plain read column": "dcp.load column / load column",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("out/bench"))
    parser.add_argument("--json", type=Path, default=Path("out/bench_save_load.json"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    shutil.rmtree(arguments.folder, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    subprocess.run([*command, __file__, *sys.argv[1:]], check=True, env=environment, timeout=1800)
    shutil.rmtree(arguments.folder, ignore_errors=True)


class Contest:
    """Runs contestants in turn and keeps the slowest rank's seconds of each."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.peaks: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            # What the last contestant left and what was deleted since is the disk's business no more.
            os.sync()
            time.sleep(SETTLE_S)
        dist.barrier()
        before = reset_peak()
        started = time.perf_counter()
        with SharedMemory() as shared:
            result = work()
            seconds = time.perf_counter() - started
        # What the slowest rank took, and the most memory any rank needed beside what it had; what
        # ranks hand over in shared memory is in no rank's own, and is counted to each in equal parts.
        extra = (peak_rss() - before + shared.peak / dist.get_world_size()) / 1e6
        facts = torch.tensor([seconds, extra], dtype=torch.float64)
        dist.all_reduce(facts, op=dist.ReduceOp.MAX)
        self.seconds.setdefault(name, []).append(float(facts[0]))
        self.peaks[name] = max(self.peaks.get(name, 0.0), float(facts[1]))
        return result

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


class SharedMemory:
    """Watches how much of the host's shared memory is taken while something runs."""

    def __enter__(self) -> SharedMemory:
        self._before = self._used()
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, self._used() - self._before)

    @staticmethod
    def _used() -> int:
        return shutil.disk_usage("/dev/shm").used


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_rss() -> int:
    return status_bytes("VmHWM")


def run_rank(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    count = round(arguments.gigabytes * 1e9 / (SIDE * SIDE * 4)) or 1

    def model(dim: int) -> nn.Module:
        sizes = [SIDE, SIDE]
        sizes[dim] //= dist.get_world_size()
        module = nn.Module()
        for index in range(count):
            local = torch.rand(sizes)
            tensor = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            module.register_parameter(f"w{index}", nn.Parameter(tensor))
        return module

    rows, columns = model(0), model(1)
    contest = Contest()
    figures = measure(arguments, contest, rows, columns)
    if dist.get_rank() == 0:
        report(arguments, contest, figures, count * SIDE * SIDE * 4)
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, contest: Contest, rows: Any, columns: Any) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import holdfast

    root: Path = arguments.folder
    rank = dist.get_rank()

    def fresh(name: str) -> Path:
        path = root / name
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            root.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        return path

    def plain_write() -> None:
        descriptor = os.open(root / f"plain-{rank}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        for tensor in rows.state_dict().values():
            os.write(descriptor, memoryview(tensor.to_local().numpy()).cast("B"))
        os.fsync(descriptor)
        os.close(descriptor)

    def dcp_hf() -> None:
        keys = dict.fromkeys(rows.state_dict(), 1)
        writer = dcp.HuggingFaceStorageWriter(
            str(root / "dcp-hf"), fqn_to_index_mapping=keys, save_distributed=True, enable_consolidation=True
        )
        dcp.save(rows.state_dict(), storage_writer=writer)

    def spoil(module: Any) -> None:
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.to_local().zero_()

    def plain_read(module: Any, dim: int) -> None:
        """Copy the rank's rows or columns of every tensor from a map of the files that hold them in order."""
        for key, tensor in module.state_dict().items():
            place = stored[key]
            with (root / "row" / place.file).open("rb") as file:
                start = place.begin - place.begin % mmap.ALLOCATIONGRANULARITY
                size = place.begin - start + SIDE * SIDE * 4
                view = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED | POPULATE, mmap.PROT_READ, offset=start)
                whole = np.frombuffer(view, np.float32, SIDE * SIDE, place.begin - start).reshape(SIDE, SIDE)
                part = np.array_split(whole, dist.get_world_size(), dim)[rank]
                tensor.to_local().numpy()[...] = part

    def load_dcp(module: Any) -> None:
        dcp.load(module.state_dict(), checkpoint_id=str(root / "dcp"))

    def check(module: Any, expected: list[Any]) -> None:
        for tensor, value in zip(module.state_dict().values(), expected, strict=True):
            assert torch.equal(tensor.to_local(), value), "a load gave other values than were saved"

    fresh("row")
    holdfast.save(root / "row", {"model": rows})
    fresh("dcp")
    dcp.save(rows.state_dict(), checkpoint_id=str(root / "dcp"))
    holdfast.load(root / "row", {"model": columns})
    truth = {
        id(module): [tensor.to_local().clone() for tensor in module.state_dict().values()] for module in (rows, columns)
    }
    stored = holdfast.open(root / "row").places["model"]
    figures: dict[str, float] = {}
    for _ in range(arguments.rounds):
        fresh(f"plain-{rank}")
        contest.run("plain write", plain_write)
        if rank == 0:
            for path in root.glob("plain-*"):
                path.unlink()
        fresh("save-row")
        contest.run("save row", lambda: holdfast.save(root / "save-row", {"model": rows}))
        fresh("save-row")
        fresh("dcp-hf")
        contest.run("DCP HF consolidated", dcp_hf)
        fresh("dcp-hf")
        contest.run("save column", lambda: holdfast.save(root / "save-column", {"model": columns}))
        fresh("save-column")
        for module, suffix in ((rows, ""), (columns, " column")):
            contest.run(f"dcp.load{suffix}", partial(load_dcp, module))
            spoil(module)
            contest.run(f"plain read{suffix}", partial(plain_read, module, 1 if suffix else 0))
            check(module, truth[id(module)])
            for verify, label in ((False, ""), (True, " verified")):
                spoil(module)
                result = contest.run(
                    f"load{suffix}{label}",
                    partial(holdfast.load, root / "row", {"model": module}, verify=verify),
                )
                facts = torch.tensor([result.read_bytes, result.needed_bytes], dtype=torch.float64)
                dist.all_reduce(facts)
                ratio = float(facts[0] / facts[1])
                name = "read / touched blocks, verified" if verify else "read / needed, unverified"
                figures[name] = max(figures.get(name, 0.0), ratio)
                check(module, truth[id(module)])
    return figures


def report(arguments: argparse.Namespace, contest: Contest, figures: dict[str, float], total_bytes: int) -> None:
    def ratio(over: str, under: str) -> float:
        return contest.median(over) / contest.median(under)

    share = total_bytes / arguments.ranks / 1e6
    figures |= {
        "save row / plain write": ratio("save row", "plain write"),
        "DCP HF consolidated / save row": ratio("DCP HF consolidated", "save row"),
        "save column / plain write": ratio("save column", "plain write"),
        "dcp.load / plain read": ratio("dcp.load", "plain read"),
        "dcp.load column / plain read column": ratio("dcp.load column", "plain read column"),
        "load peak MB": max(contest.peaks["load"], contest.peaks["load verified"]),
        "load column peak MB": max(contest.peaks["load column"], contest.peaks["load column verified"]),
        "save row peak MB beyond one copy": contest.peaks["save row"] - share,
        "save column peak MB beyond one copy": contest.peaks["save column"] - share,
    }
    for suffix in ("", " column"):
        for label in ("", " verified"):
            figures[f"dcp.load{suffix} / load{suffix}{label}"] = ratio(f"dcp.load{suffix}", f"load{suffix}{label}")
    print(f"\n{total_bytes / 1e9:.2f} GB, {arguments.ranks} ranks, {arguments.rounds} rounds, medians\n")
    for name, seconds in contest.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"  {name:26} {statistics.median(seconds):7.3f} s   ({spread})   peak +{contest.peaks[name]:.0f} MB")
    print()
    for name, (sign, target) in TARGETS.items():
        good = figures[name] <= target if sign == "<=" else figures[name] >= target
        print(f"  {name:40} {figures[name]:8.2f}   wanted {sign} {target:g}   {'ok' if good else 'MISSED'}")
    for name, limited in LIMITS.items():
        print(f"  {name:40} {figures[name]:8.2f}   the most that {limited} can be here")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"bytes": total_bytes, "seconds": contest.seconds, "peaks_mb": contest.peaks, "figures": figures}
    arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
