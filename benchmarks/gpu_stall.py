"""What a save costs training on one GPU, beside PyTorch's own asynchronous checkpointing, in one run.

    python -m benchmarks.gpu_stall --step-ms 580        # needs a CUDA device with some 80 GB
    python -m benchmarks.gpu_stall --step-ms 150

A model of 1.34 billion fp32 parameters with AdamW, 16 GB of state, trains for real. Each
round runs 25 steps without a save and 25 with one save for each contestant, in turn; the
extra time is the difference of the medians. The very first save is measured apart. At the
end the published bytes are compared with a copy taken at the call while training ran on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast

STEPS = 25
SAVE_AT = 3
WARM_STEPS = 8  # before each run: a device that has idled is cool and fast
BLOCK = 32 << 20
THREADS = 8


class Block(nn.Module):
    """Attention-free transformer block: the matrices of one, without its softmax."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.sigmoid(q) * k + v)
        return x + self.down(torch.relu(self.up(x)))


class Training:
    """A model, its optimizer, and steps of about a given length."""

    def __init__(self, layers: int, width: int, step_ms: float, *, fused: bool, device: str) -> None:
        self.device = device
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.model = nn.Sequential(nn.Embedding(16384, width), *(Block(width) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)
        self.tokens = torch.randint(0, 16384, (4096,), device=device)
        self.passes = 1
        self.guard: Callable[[], Any] = contextlib.nullcontext
        for _ in range(3):
            self.step()
        one = min(self.timed(3) for _ in range(2)) / 3
        self.passes = 2
        two = min(self.timed(3) for _ in range(2)) / 3
        self.passes = max(1, round((step_ms / 1000 - (2 * one - two)) / (two - one)))

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.passes):
            self.model(self.tokens).square().mean().backward()
        with self.guard():
            self.optimizer.step()

    def timed(self, count: int, save: Callable[[], Any] | None = None, *, warm: int = 0) -> float:
        for _ in range(warm):
            self.step()
        self.synchronize()
        started = time.perf_counter()
        for number in range(count):
            self.step()
            if save is not None and number == SAVE_AT:
                save()
        self.synchronize()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def tensors(self) -> dict[str, torch.Tensor]:
        out = {f"model/{key}": value for key, value in self.model.state_dict().items()}
        names = {id(param): key for key, param in self.model.named_parameters()}
        for param, state in self.optimizer.state.items():
            out |= {f"optimizer/{names[id(param)]}/{name}": value for name, value in state.items()}
        return out


class Holdfast:
    name = "holdfast"

    def __init__(self, training: Training, folder: Path) -> None:
        self.training = training
        self.root = folder / "holdfast"
        self.events: list[holdfast.Event] = []
        self.checkpointer = holdfast.Checkpointer(self.root, writer_threads=THREADS, on_event=self.events.append)
        self.checkpointer.prepare(training.state)
        self.number = 0
        self.handle: Any = None
        self.written: list[float] = []

    def save(self) -> None:
        self.number += 1
        self.handle = self.checkpointer.save(self.number, self.training.state)

    def finish(self) -> None:
        checkpoint = self.handle.result(300)
        self.written.append(next(e.seconds for e in reversed(self.events) if e.name == "published"))
        del checkpoint
        for old in self.checkpointer.steps()[:-1]:
            shutil.rmtree(self.root / f"step-{old:012d}")

    def close(self) -> None:
        self.checkpointer.close()
        shutil.rmtree(self.root, ignore_errors=True)


class DcpAsync:
    """dcp.async_save with its cached, pinned stager."""

    name = "dcp.async_save, cached pinned stager"

    def __init__(self, training: Training, folder: Path) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.training = training
        self.root = folder / "dcp"
        self.stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self.written: list[float] = []

    def save(self) -> None:
        from torch.distributed.checkpoint import async_save
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        self.started = time.perf_counter()
        state = {"model": model, "optimizer": optimizer}
        self.future: Any = async_save(state, checkpoint_id=str(self.root), async_stager=self.stager)

    def finish(self) -> None:
        self.future.result()
        self.written.append(time.perf_counter() - self.started)
        shutil.rmtree(self.root, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class TorchCheckpointing:
    """torch_checkpointing 0.1.1, prewarmed, with its lock around optimizer.step."""

    name = "torch_checkpointing 0.1.1, lock and prewarm"

    def __init__(self, training: Training, folder: Path) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self.training = training
        self.root = folder / "tc"
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self.manager.prewarm_staging(self.payload())
        self.written: list[float] = []

    def payload(self) -> dict[str, Any]:
        return {"model": self.training.model.state_dict(), "optimizer": self.training.optimizer.state_dict()}

    def save(self) -> None:
        self.started = time.perf_counter()
        self.future: Any = self.manager.save(str(self.root), self.payload())

    def finish(self) -> None:
        self.future.result()
        self.written.append(time.perf_counter() - self.started)
        shutil.rmtree(self.root, ignore_errors=True)

    def close(self) -> None:
        self.manager.close()
        shutil.rmtree(self.root, ignore_errors=True)


def plain_write(folder: Path, size: int) -> float:
    """The same bytes into files of 5 GB, by as many threads, synced."""
    folder.mkdir(parents=True)
    source = np.random.default_rng(0).integers(0, 256, 1 << 30, dtype=np.uint8)
    files = [os.open(folder / str(n), os.O_CREAT | os.O_WRONLY) for n in range(-(-size // 5_000_000_000))]
    ends = [min(5_000_000_000, size - number * 5_000_000_000) for number in range(len(files))]
    blocks = [(number, at) for number, end in enumerate(ends) for at in range(0, end, BLOCK)]
    started = time.perf_counter()

    def write(block: tuple[int, int]) -> None:
        number, at = block
        count = min(BLOCK, ends[number] - at)
        begin = at % (source.size - BLOCK)
        os.pwrite(files[number], source[begin : begin + count].data, at)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, blocks))
        list(pool.map(os.fsync, files))
    seconds = time.perf_counter() - started
    for file in files:
        os.close(file)
    shutil.rmtree(folder)
    return seconds


def same_bytes(training: Training, contestant: Holdfast) -> tuple[int, int]:
    """Save while training runs on; how many tensors equal the copy taken at the call, of how many."""
    copy = {key: value.clone() for key, value in training.tensors().items()}
    contestant.save()
    for _ in range(5):
        training.step()
    checkpoint = contestant.handle.result(300)
    equal = 0
    for key, value in copy.items():
        group, _, name = key.partition("/")
        stored = torch.from_numpy(np.asarray(checkpoint.read(name, group)))
        equal += torch.equal(stored.to(value.device), value)
    contestant.finish()
    return equal, len(copy)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=580.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--foreach", action="store_true", help="AdamW in its foreach form instead of fused")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the script")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--folder", type=Path, default=Path("out/gpu"))
    parser.add_argument("--json", type=Path, default=Path("out/gpu_stall.json"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    run(arguments)


def peers(training: Training, folder: Path) -> Iterator[Any]:
    """Those that work here, each after a first save, which is not what is compared."""
    for kind in (DcpAsync, TorchCheckpointing):
        try:
            peer: Any = kind(training, folder)
            peer.save()
            peer.finish()
        except Exception as error:  # noqa: BLE001  (a peer that fails is left out, and said)
            say(f"{kind.name} is left out: {type(error).__name__}: {error}")
        else:
            yield peer


def run(arguments: argparse.Namespace) -> None:
    fused = not arguments.foreach
    training = Training(arguments.layers, arguments.width, arguments.step_ms, fused=fused, device=arguments.device)
    size = sum(value.numel() * value.element_size() for value in training.tensors().values())
    contestants: list[Any] = [Holdfast(training, arguments.folder)]
    until = time.monotonic() + 60
    while not (ready := [event.seconds for event in contestants[0].events if event.name == "arena"]):
        training.timed(5)
        if time.monotonic() > until:
            sys.exit("the arena was not ready within a minute")
    first = training.timed(STEPS, contestants[0].save, warm=WARM_STEPS)
    first_stall = contestants[0].handle.stall_ms
    contestants[0].finish()
    say(f"{size / 1e9:.2f} GB, arena ready in {ready} s, the first call {first_stall:.1f} ms")
    if not arguments.alone:
        contestants += list(peers(training, arguments.folder))
    without = []
    times: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    stalls = []
    plain = []
    for _ in range(arguments.rounds):
        without.append(training.timed(STEPS, warm=WARM_STEPS))
        for contestant in contestants:
            if isinstance(contestant, TorchCheckpointing):
                training.guard = contestant.manager.lock
            times[contestant.name].append(training.timed(STEPS, contestant.save, warm=WARM_STEPS))
            contestant.finish()
            extra_ms = (times[contestant.name][-1] - without[-1]) * 1000
            say(f"{contestant.name}: {extra_ms:.0f} ms extra, written in {contestant.written[-1]:.1f} s")
            training.guard = contextlib.nullcontext
            if contestant is contestants[0]:
                stalls.append(contestant.handle.stall_ms)
        plain.append(plain_write(arguments.folder / "plain", size))
        say(f"plain write: {plain[-1]:.1f} s")
    without.append(training.timed(STEPS, warm=WARM_STEPS))
    base = statistics.median(without)
    results = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "state_gb": size / 1e9,
        "tensors": len(training.tensors()),
        "step_ms": base / STEPS * 1000,
        "arena_ready_s": ready,
        "spread_without_ms": (max(without) - min(without)) * 1000,
        "first_extra_ms": (first - base) * 1000,
        "first_save_call_ms": first_stall,
        "save_call_ms": stalls,
        "extra_ms": {name: (statistics.median(own) - base) * 1000 for name, own in times.items()},
        "extra_ms_all": {name: [(one - base) * 1000 for one in own] for name, own in times.items()},
        "written_s": {c.name: statistics.median(c.written) for c in contestants},
        "plain_write_s": statistics.median(plain),
        "plain_write_s_all": plain,
    }
    results["published / plain write"] = results["written_s"]["holdfast"] / results["plain_write_s"]
    print(table(results), flush=True)
    for contestant in contestants[1:]:
        contestant.close()
    results["equal_tensors"] = same_bytes(training, contestants[0])
    print("equal to the copy taken at the call: {} of {} tensors".format(*results["equal_tensors"]))
    contestants[0].close()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1))


def table(results: dict[str, Any]) -> str:
    lines = [
        f"{results['device']}, torch {results['torch']}, {results['state_gb']:.2f} GB in {results['tensors']} tensors, "
        f"step {results['step_ms']:.0f} ms; 25 steps without a save differ by {results['spread_without_ms']:.0f} ms",
        "| | extra ms over 25 steps | each | seconds until written |",
        "|---|---|---|---|",
    ]
    for name, extra in results["extra_ms"].items():
        each = ", ".join(f"{one:.0f}" for one in results["extra_ms_all"][name])
        lines.append(f"| {name} | {extra:.0f} | {each} | {results['written_s'][name]:.1f} |")
    lines += [
        f"first save: {results['first_extra_ms']:.0f} ms extra, the call {results['first_save_call_ms']:.1f} ms; "
        f"calls after it {', '.join(f'{ms:.1f}' for ms in results['save_call_ms'])} ms",
        f"published / plain write with {THREADS} threads and fsync: {results['published / plain write']:.2f} "
        f"({results['plain_write_s']:.1f} s)",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
