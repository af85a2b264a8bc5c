"""The plan of a 1-trillion-parameter mixture of experts on 16,384 ranks, made for one rank in one process.

    python -m benchmarks.plan_scale

61 layers with 256 experts each; pipeline 16 x (data 128 x tensor 8); experts are dealt to 64
groups of expert parallelism, FSDP2 shards the rest. Weights, fp32 masters and two moments.
Prints the seconds and the memory that one rank takes to plan its own host's share.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from pathlib import Path

from holdfast.adapters.saving.agreement import AgreedTensor, Agreement
from holdfast.engine.checkpoint_plan import plan_checkpoint
from holdfast.engine.options import SaveOptions
from holdfast.format.dtypes import dtype_named
from holdfast.layout.placement import Mesh, OnMesh, Placement, Replicate, Shard, Spread, Spreads, StridedShard
from holdfast.plan.coverage import Holdings
from holdfast.plan.writer_job import ArenaLayout, writer_job

PIPELINE, DATA, TENSOR, EXPERT = 16, 128, 8, 64
LAYERS, EXPERTS, HIDDEN, WIDE = 61, 256, 7168, 2992
GPUS_PER_HOST = 8
GROUPS = {"model": "bfloat16", "master_weights": "float32", "optimizer": "float32"}
BF16, F32 = dtype_named("bfloat16"), dtype_named("float32")
TARGETS = {"seconds": 5.0, "megabytes": 500.0}


class Layouts:
    """Who holds what: dense tensors over data x tensor, experts over expert x shard x tensor."""

    def __init__(self) -> None:
        self._spreads = Spreads()
        self._stage_ranks = [
            tuple(range(stage * DATA * TENSOR, (stage + 1) * DATA * TENSOR)) for stage in range(PIPELINE)
        ]

    def dense(self, stage: int, tensor_dim: int | None) -> Spread:
        ranks = self._stage_ranks[stage]
        mesh = Mesh(("data", "tensor"), (DATA, TENSOR), ranks)
        placements: tuple[Placement, ...] = (Shard(0), Replicate() if tensor_dim is None else Shard(tensor_dim))
        if tensor_dim == 0:
            placements = (StridedShard(0, TENSOR), Shard(0))
        return self._spreads.of([(OnMesh(mesh, placements), ranks)])

    def expert(self, stage: int, group: int, tensor_dim: int) -> Spread:
        shards = DATA // EXPERT
        ranks = tuple(
            self._stage_ranks[stage][(group * shards + shard) * TENSOR + tensor]
            for shard in range(shards)
            for tensor in range(TENSOR)
        )
        mesh = Mesh(("shard", "tensor"), (shards, TENSOR), ranks)
        outer: Placement = StridedShard(0, TENSOR) if tensor_dim == 0 else Shard(0)
        return self._spreads.of([(OnMesh(mesh, (outer, Shard(tensor_dim))), ranks)])


def trillion() -> tuple[dict[tuple[str, str], AgreedTensor], int]:
    """Every tensor of every rank, and the number of parameters."""
    layouts = Layouts()
    shapes: list[tuple[str, tuple[int, ...], Spread]] = []
    last = PIPELINE - 1
    shapes.append(("embed.weight", (129280, HIDDEN), layouts.dense(0, 0)))
    shapes.append(("head.weight", (129280, HIDDEN), layouts.dense(last, 0)))
    for layer in range(LAYERS):
        stage = layer * PIPELINE // LAYERS
        name = f"layers.{layer}"
        for part in ("q", "k", "v"):
            shapes.append((f"{name}.attention.{part}.weight", (HIDDEN, HIDDEN), layouts.dense(stage, 0)))
        shapes.append((f"{name}.attention.out.weight", (HIDDEN, HIDDEN), layouts.dense(stage, 1)))
        shapes.append((f"{name}.router.weight", (EXPERTS, HIDDEN), layouts.dense(stage, None)))
        for norm in ("first", "second"):
            shapes.append((f"{name}.{norm}.weight", (HIDDEN,), layouts.dense(stage, None)))
        for expert in range(EXPERTS):
            group = expert * EXPERT // EXPERTS
            for part in ("gate", "up"):
                key = f"{name}.experts.{expert}.{part}.weight"
                shapes.append((key, (WIDE, HIDDEN), layouts.expert(stage, group, 0)))
            key = f"{name}.experts.{expert}.down.weight"
            shapes.append((key, (HIDDEN, WIDE), layouts.expert(stage, group, 1)))
    tensors = {}
    for key, shape, spread in shapes:
        tensors["model", key] = AgreedTensor(BF16, BF16, shape, "parameter", spread)
        tensors["master_weights", key] = AgreedTensor(F32, F32, shape, "state", spread)
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors["optimizer", f"{key}/{moment}"] = AgreedTensor(F32, F32, shape, "state", spread)
    return tensors, sum(math.prod(shape) for _, shape, _ in shapes)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=5000)
    parser.add_argument("--json", type=Path, default=Path("out/bench_plan_scale.json"))
    arguments = parser.parse_args()
    world = PIPELINE * DATA * TENSOR
    tensors, parameters = trillion()
    agreement = Agreement(
        tensors=tensors,
        kinds=dict.fromkeys(GROUPS, "tensors"),
        aliases={},
        hosts=tuple(rank // GPUS_PER_HOST for rank in range(world)),
        mesh=Mesh.line(world),
        axes={},
        partitioned=frozenset(),
        uniform=frozenset(),
        reporters={},
        labels={},
        digest="",
        holdings=Holdings(),
    )
    before = peak_mb()
    started = time.perf_counter()
    host = arguments.rank // GPUS_PER_HOST
    neighbors = list(range(host * GPUS_PER_HOST, (host + 1) * GPUS_PER_HOST))
    options = SaveOptions(max_shard_size=5 * 10**9, block_bytes=32 << 20)
    plan = plan_checkpoint(agreement, options, only=neighbors, all_files=arguments.rank == 0)
    layouts = {rank: ArenaLayout(plan.save, rank) for rank in neighbors}
    job = writer_job(plan.save, "", arguments.rank, layouts)
    seconds = time.perf_counter() - started
    figures = {"seconds": seconds, "megabytes": peak_mb() - before}
    print(f"{parameters / 1e12:.2f} trillion parameters, {len(tensors)} tensors, {world} ranks")
    print(f"{len(plan.save.files)} files of this host, {sum(file.size for file in plan.save.files) / 1e12:.1f} TB")
    print(
        f"rank {arguments.rank}: arena {layouts[arguments.rank].size / 1e9:.2f} GB, "
        f"{len(job.blocks)} blocks of {job.bytes / 1e9:.2f} GB, gives {sum(t.size for t in job.travel) / 1e6:.2f} MB "
        "to other hosts"
    )
    print(f"memory of the process: {before:.0f} MB with the layout of all ranks, {peak_mb():.0f} MB at most")
    for name, target in TARGETS.items():
        good = "ok" if figures[name] <= target else "MISSED"
        print(f"  {name:12} {figures[name]:8.2f}   wanted <= {target:g}   {good}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
