"""A restore into one GPU, beside torch DCP, safetensors and a plain threaded reader, warm and cold, in one run.

    python -m benchmarks.gpu_restore            # needs a CUDA device with some 50 GB, and 40 GB of disk

A model of 1.34 billion fp32 parameters with AdamW, 16 GB of state, is saved once by each contestant.
The contestants take turns; the medians are printed with their rates. The plain reader does what the
machine can do: threads that read into page-locked memory, digest every byte and copy it to the device.
A save is measured beside a plain threaded write of as many bytes with fsync, and a restore from the
memory of a crashed run beside the warm load. Every load of Holdfast is compared with the saved state,
bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import load_file
from torch import nn

import holdfast
from benchmarks.gpu_stall import Block, plain_write
from holdfast.adapters.loading.device_staging import FlatTensor, staging_for
from holdfast.checkpoint.reading import MAP_BYTES, Loading
from holdfast.core.limits import LOAD_MEMORY_BYTES
from holdfast.core.ranks import SingleProcess
from holdfast.layout.box import Box
from holdfast.plan.files import Place
from holdfast.plan.load_plan import Want, plan_load

THREADS = 16
CHUNK = 4 << 20


def make_model(layers: int, width: int, dtype: torch.dtype) -> nn.Module:
    with torch.device("cuda"):
        return nn.Sequential(nn.Embedding(16384, width), *(Block(width) for _ in range(layers))).to(dtype)


class State:
    """A model and an optimizer with random state on the device."""

    def __init__(self, layers: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.model = make_model(layers, width, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def live(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        moments = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]

    def spoil(self) -> None:
        for tensor in self.tensors():
            tensor.fill_(7)
        torch.cuda.synchronize()

    def equals(self, other: State) -> bool:
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return all(torch.equal(a, b if a.dtype == b.dtype else b.to(a.dtype)) for a, b in pairs)

    def dictionary(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "moments": {str(number): tensor for number, tensor in enumerate(self.tensors())},
        }


def evict(files: Iterable[Path]) -> None:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(files: Iterable[Path]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_touch, files))


def _touch(file: Path) -> None:
    buffer = bytearray(CHUNK)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def plain_read(files: list[Path], *, direct: bool) -> None:
    """Read every byte on threads, digest it and copy it to the device."""
    chunks = [(file, at) for file in files for at in range(0, file.stat().st_size, CHUNK)]
    numbers = itertools.count()
    sizes = {file: file.stat().st_size for file in files}
    targets = {file: torch.empty(size, dtype=torch.uint8, device="cuda") for file, size in sizes.items()}
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    descriptors = {file: os.open(file, flags) for file in files}

    def run() -> None:
        ring = torch.empty(2, CHUNK, dtype=torch.uint8, pin_memory=True)
        events = [torch.cuda.Event() for _ in range(2)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in itertools.count():
                number = next(numbers)
                if number >= len(chunks):
                    break
                file, at = chunks[number]
                slot = turn % 2
                events[slot].synchronize()
                memory = ring[slot].numpy()
                count = os.preadv(descriptors[file], [memory.data], at)
                xxhash.xxh3_64_intdigest(memory[:count].data)
                targets[file][at : at + count].copy_(ring[slot][:count], non_blocking=True)
                events[slot].record()
            stream.synchronize()

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(run) for _ in range(THREADS)]:
            future.result()
    for descriptor in descriptors.values():
        os.close(descriptor)


def crash(root: Path, layers: int, width: int) -> None:
    """In a process of its own: capture a step that cannot be written, since its folder is taken, and die."""
    state = State(layers, width, 1)
    (root / "step-000000000001").mkdir(parents=True)
    (root / "step-000000000001" / "notes.txt").write_text("not a checkpoint")
    checkpointer = holdfast.Checkpointer(root)
    checkpointer.save(1, state.live).wait(300)
    os.kill(os.getpid(), signal.SIGKILL)


def restore_from_memory(root: Path, live: State, times: dict[str, list[float]]) -> None:
    """Restore the step that `crash` left in memory; the load and the whole call are timed apart."""
    (root / "step-000000000001" / "notes.txt").unlink()
    (root / "step-000000000001").rmdir()
    with warnings.catch_warnings(), holdfast.Checkpointer(root) as checkpointer:
        warnings.simplefilter("ignore")
        with timed(times, "restore from memory, the whole call"):
            assert checkpointer.restore(live.live) == 1
        assert checkpointer.last_report is not None
        times.setdefault("restore from memory, its load", []).append(checkpointer.last_report.seconds)
        print(
            f"  its load: {checkpointer.last_report.seconds:.3f} s",
            dict(checkpointer.last_report.phases),
            file=sys.stderr,
        )
    shutil.rmtree(root)


class _ShardDestination:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def flat(self) -> FlatTensor:
        return FlatTensor(self._tensor, self._tensor.dtype)

    def direct(self) -> None:
        return None

    def put(self, part: Box, data: Any) -> None:
        raise AssertionError("a contiguous tensor on the device takes bytes")


def load_shards(path: Path, dim: int, *, verify: bool) -> int:
    """Load the state as 4 shards of rows or columns, one after another; returns the bytes that were read."""
    checkpoint = holdfast.open(path)
    read = 0
    for part in range(4):
        destinations: dict[tuple[Place, Box], list[_ShardDestination]] = {}
        kept = []
        for group in checkpoint.contents.groups.values():
            for recipe in group.tensors.values():
                (place,) = recipe.sources()
                shape = place.spec.shape
                if not shape:
                    continue
                along = min(dim, len(shape) - 1)
                rows = shape[along] // 4
                offsets, sizes = [0] * len(shape), list(shape)
                offsets[along], sizes[along] = part * rows, rows
                box = Box(tuple(offsets), tuple(sizes))
                kept.append(torch.empty(sizes, dtype=torch.float32, device="cuda"))
                destinations[place, box] = [_ShardDestination(kept[-1])]
        wants = [Want(place, box, 0) for place, box in destinations]
        reads = plan_load(checkpoint.contents.files, wants, verify=verify, portion_bytes=MAP_BYTES)
        staging = partial(staging_for, [torch.device("cuda", 0)], LOAD_MEMORY_BYTES, 1)
        loaded = Loading(SingleProcess(), checkpoint, destinations, lambda size: None, staging).run_local(reads)
        assert loaded.failure is None, loaded.failure
        read += loaded.read_bytes
    return read


@contextlib.contextmanager
def timed(times: dict[str, list[float]], name: str) -> Iterator[None]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    yield
    torch.cuda.synchronize()
    times.setdefault(name, []).append(time.perf_counter() - began)
    print(f"  {name}: {times[name][-1]:.3f} s", file=sys.stderr, flush=True)


def main() -> None:
    arguments = _arguments()
    folder: Path = arguments.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    saved, live = (State(arguments.layers, arguments.width, seed) for seed in (1, 2))
    times: dict[str, list[float]] = {}
    size = sum(tensor.numel() * tensor.element_size() for tensor in saved.tensors())
    for _ in range(arguments.save_rounds):
        shutil.rmtree(folder / "step", ignore_errors=True)
        with timed(times, "holdfast.save"):
            holdfast.save(folder / "step", saved.live)
        times.setdefault("plain write", []).append(plain_write(folder / "plain", size))
        print(f"  plain write: {times['plain write'][-1]:.3f} s", file=sys.stderr, flush=True)
    files = sorted((folder / "step").rglob("*.safetensors"))
    weights = [file for file in files if "model" in file.name and "optimizer" not in str(file.relative_to(folder))]
    total = sum(file.stat().st_size for file in files)
    if arguments.peers:
        dcp.save(saved.dictionary(), checkpoint_id=str(folder / "dcp"), no_dist=True)
    peers = sorted(file for file in (folder / "dcp").rglob("*") if file.is_file()) if arguments.peers else []

    def load(name: str, **options: Any) -> Callable[[], None]:
        def run() -> None:
            live.spoil()
            with timed(times, name):
                holdfast.load(folder / "step", live.live, **options)
            assert live.equals(saved), name

        return run

    def plain(name: str, *, direct: bool = False) -> Callable[[], None]:
        def run() -> None:
            with timed(times, name):
                plain_read(files, direct=direct)

        return run

    def peer(name: str) -> Callable[[], None]:
        def run() -> None:
            target = live.dictionary()
            with timed(times, name):
                dcp.load(target, checkpoint_id=str(folder / "dcp"), no_dist=True)

        return run

    def shards(name: str, dim: int, *, verify: bool) -> Callable[[], None]:
        def run() -> None:
            with timed(times, name):
                read = load_shards(folder / "step", dim, verify=verify)
            times.setdefault(f"{name}, GB/s", []).append(read / times[name][-1] / 1e9)

        return run

    def tensors() -> None:
        with timed(times, "safetensors, weights only"):
            for file in weights:
                load_file(file, device="cuda")

    turns: list[Callable[[], None]] = [
        plain("plain reader, warm"),
        load("load, warm"),
        load("load, warm, unverified", verify=False),
        load("load, warm, 64 MB", memory_bytes="64MB"),
        shards("4 row shards", 0, verify=True),
        shards("4 column shards", 1, verify=True),
        shards("4 column shards, unverified", 1, verify=False),
        tensors,
    ]
    warm(files)
    for _ in range(arguments.rounds):
        for turn in turns:
            turn()
    if arguments.peers:
        warm(peers)
        for _ in range(arguments.peer_rounds):
            peer("dcp.load, warm")()
    cold: list[Callable[[], None]] = [plain("plain reader, cold", direct=True), load("load, cold")]
    for _ in range(arguments.cold_rounds):
        for turn in cold:
            evict(files)
            turn()
    if arguments.peers:
        for _ in range(arguments.peer_rounds):
            evict(peers)
            peer("dcp.load, cold")()
    warm(files)
    _cast(arguments, folder, saved, times)
    for _ in range(arguments.memory_rounds):
        live.spoil()
        torch.cuda.empty_cache()
        victim = multiprocessing.get_context("spawn").Process(
            target=crash, args=(folder / "crashed", arguments.layers, arguments.width)
        )
        victim.start()
        victim.join()
        restore_from_memory(folder / "crashed", live, times)
        assert live.equals(saved), "from memory"
    _print(times, total, arguments.json)
    shutil.rmtree(folder)


def _cast(arguments: argparse.Namespace, folder: Path, saved: State, times: dict[str, list[float]]) -> None:
    """A model in bfloat16 from fp32 weights, beside the same model in fp32."""
    for dtype, name in ((torch.bfloat16, "model, cast to bf16"), (torch.float32, "model, fp32")) * arguments.rounds:
        model = make_model(arguments.layers, arguments.width, dtype)
        with timed(times, name):
            holdfast.load(folder / "step", {"model": model}, cast=True)
        pairs = zip(model.parameters(), saved.model.parameters(), strict=True)
        assert all(torch.equal(a, b.to(dtype)) for a, b in pairs), name


def _print(times: dict[str, list[float]], total: int, out: Path) -> None:
    print(f"{total / 1e9:.2f} GB; medians")
    for name, values in times.items():
        median = statistics.median(values)
        rate = "" if "GB/s" in name else f"  {total / median / 1e9:6.1f} GB/s"
        print(f"{name:36} {median:8.3f}  ({min(values):.3f} to {max(values):.3f}){rate}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"bytes": total, "times": times}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_restore")
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-rounds", type=int, default=3)
    parser.add_argument("--save-rounds", type=int, default=3)
    parser.add_argument("--memory-rounds", type=int, default=2)
    parser.add_argument("--peer-rounds", type=int, default=2)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="without torch DCP")
    parser.add_argument("--folder", type=Path, default=Path("out/gpu_restore"))
    parser.add_argument("--json", type=Path, default=Path("out/gpu_restore.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
