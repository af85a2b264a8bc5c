"""A compiled tensor-parallel decoder, training, with holdfast.spmd and with torch alone: a table of ratios.

Each way has ranks of its own (gloo), which compile once and then train in turns: while one way's ranks work, the
others wait. Processor time is counted, that of the busier rank, and the fastest turn of each way: on a shared machine
noise only ever slows a turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import holdfast.spmd

RANKS = 2
DIM, HEADS, VOCABULARY, LAYERS = 128, 4, 512, 2
BATCH, LENGTH = 2, 64
DEADLINE_S = 600.0
LIMIT = 1.05


class Layer(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).view(BATCH, LENGTH, -1, DIM // HEADS).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(DIM, 4 * DIM), nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tensor_parallel() -> dict[str, ParallelStyle]:
    """Megatron's plan: activations between layers are replicas."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.query": ColwiseParallel(),
        "layers.*.attention.key": ColwiseParallel(),
        "layers.*.attention.value": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.gate": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_parallel() -> dict[str, ParallelStyle]:
    """Activations between layers are sharded along the sequence."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return tensor_parallel() | {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.before_attention": SequenceParallel(),
        "layers.*.before_mlp": SequenceParallel(),
        "layers.*.attention": gathered,
        "layers.*.mlp": gathered,
        "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


PLANS: dict[str, Callable[[], dict[str, ParallelStyle]]] = {
    "tensor parallel": tensor_parallel,
    "tensor and sequence parallel": sequence_parallel,
}


def rank_main(rank: int, plan: str, on: bool, backend: str, steps: int, folder: str, parent: Connection) -> None:
    """Train `steps` steps for each message of the parent, and answer with the seconds and the last loss."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    if on:
        holdfast.spmd.enable()
    torch.manual_seed(0)
    model = parallelize_module(Decoder(), init_device_mesh("cpu", (RANKS,)), PLANS[plan]())
    tokens, targets = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH))

    @torch.compile(backend=backend)
    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    def train() -> float:
        for _ in range(steps):
            loss = forward(tokens, targets)
            loss.backward()
            model.zero_grad()
        return float(loss)

    train()
    parent.send((0.0, train()))
    while parent.recv():
        dist.barrier()
        began = time.process_time()
        loss = train()
        parent.send((time.process_time() - began, loss))
    dist.destroy_process_group()


class Team:
    """The ranks of one way."""

    def __init__(self, plan: str, on: bool, backend: str, steps: int):
        self._folder = tempfile.TemporaryDirectory(prefix="spmd-compiled-")
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(RANKS)]
        self._pipes = [ours for ours, _ in pipes]
        self._ranks = [
            context.Process(
                target=rank_main, args=(rank, plan, on, backend, steps, self._folder.name, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._ranks:
            process.start()
        self.loss = self._answers()[1]

    def turn(self) -> float:
        """Train one turn; return the processor seconds of the busier rank."""
        for pipe in self._pipes:
            pipe.send(True)
        return self._answers()[0]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._ranks:
            process.join(DEADLINE_S)
        self._folder.cleanup()

    def _answers(self) -> tuple[float, float]:
        found = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(DEADLINE_S):
                raise TimeoutError(f"rank {rank} did not answer within {DEADLINE_S:.0f} s")
            found.append(pipe.recv())
        return max(seconds for seconds, _ in found), found[0][1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.spmd_compiled", description=__doc__)
    parser.add_argument("--turns", type=int, default=15, help="how often each way is timed")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--backend", default="inductor", help="torch.compile's backend")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {RANKS} ranks, backend {arguments.backend}, {arguments.turns} turns each way")
    print(f"{'ms per step':32}{'fastest turn':>20}{'':8}{'median turn':>20}{'':8}{'difference':>10}")
    print(f"{'':32}{'torch':>10}{'with':>10}{'ratio':>8}{'torch':>10}{'with':>10}{'ratio':>8}{'of losses':>10}")
    worst = 0.0
    for plan in PLANS:
        teams = {on: Team(plan, on, arguments.backend, arguments.steps) for on in (False, True)}
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(arguments.turns):
            for on in (False, True) if turn % 2 else (True, False):
                times[on].append(teams[on].turn())
        for team in teams.values():
            team.close()
        fastest, middle = (
            {on: pick(times[on]) / arguments.steps * 1e3 for on in times} for pick in (min, statistics.median)
        )
        ratio = fastest[True] / fastest[False]
        worst = max(worst, ratio)
        apart = abs(teams[True].loss - teams[False].loss)
        print(
            f"{plan:32}{fastest[False]:>10.2f}{fastest[True]:>10.2f}{ratio:>8.3f}"
            f"{middle[False]:>10.2f}{middle[True]:>10.2f}{middle[True] / middle[False]:>8.3f}{apart:>10.1e}"
        )
    print(f"largest ratio {worst:.3f}; limit {LIMIT}")
    return 1 if worst > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
