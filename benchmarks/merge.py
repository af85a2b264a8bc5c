"""Merge three models of about 291 million parameters in bfloat16, beside mergekit on the same files.

    python -m benchmarks.merge [--rounds 5] [--methods linear ties]

Every round does each contestant once, in turn, each in a process of its own; the table shows medians. The time to
start the interpreter and import the libraries is taken apart: a process imports, notes its memory, and then merges.
Peak memory is that of the process above the memory after the imports, as the kernel counts it. mergekit's `linear`
is given the same weights, and its result is compared bit for bit.

What is in each time: reading the inputs (from the page cache: all are read once before each run), the merge, and
writing. Holdfast's also has the digests of inputs and output, and ends when the output is durable: fsync is part of
it. mergekit ends when its output is in the page cache; "durable" is its time until fsync of its files has returned.
The floor reads the same inputs, adds them in bfloat16 and writes and syncs a file of the same size, past the page cache
and on as many threads as there are cores; it digests nothing, rounds after each sum, and knows no tensors. No merge of
these files that ends durable can take much less. CPU is that of all threads, user and system. With a load from other
processes compare CPU, and with --folder in /dev/shm what remains without a disk.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TARGETS = {"linear": 5.0, "ties": 2.0}
MEMORY_TARGET = 3.0
CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
SETTLE_S = 1.0
BLOCK_BYTES = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=list(TARGETS))
    parser.add_argument("--folder", type=Path, default=Path("out/bench-merge"))
    parser.add_argument("--json", type=Path, default=Path("out/bench_merge.json"))
    parser.add_argument("--contestant", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        contest(*arguments.contestant, folder=arguments.folder)
        return
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", _MAKE.format(config=CONFIG, folder=str(arguments.folder))], check=True)
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for method in arguments.methods:
        results[method] = {"holdfast": [], "mergekit": [], **({"floor": []} if method == "linear" else {})}
        for _ in range(arguments.rounds):
            for name, runs in results[method].items():
                runs.append(run(name, method, arguments.folder))
        compare(method, arguments.folder)
    report(results, arguments.json)
    shutil.rmtree(arguments.folder, ignore_errors=True)


_MAKE = """
import torch, transformers
from pathlib import Path
config = transformers.LlamaConfig(**{config})
model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
base = {{key: value.clone() for key, value in model.state_dict().items()}}
for name in ("base", "a", "b"):
    torch.manual_seed(len(name) + ord(name[0]))
    for key, value in model.state_dict().items():
        value.copy_(base[key] if name == "base" else (base[key] + 0.01 * torch.randn_like(base[key])))
    model.save_pretrained(Path({folder!r}) / name)
"""


def run(name: str, method: str, folder: Path) -> dict[str, float]:
    """Run a contestant in a process of its own and return its figures."""
    target = folder / f"{method}-{name}"
    shutil.rmtree(target, ignore_errors=True)
    for file in inputs(folder):
        with file.open("rb") as opened:
            while opened.read(BLOCK_BYTES):
                pass
    os.sync()
    time.sleep(SETTLE_S)
    arguments = ["--contestant", name, method, str(target), "--folder", str(folder)]
    command = [sys.executable, "-m", "benchmarks.merge", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def contest(name: str, method: str, target: str, *, folder: Path) -> None:
    """Import, then merge; print the seconds and the peak of the memory above that after the imports."""
    started = time.perf_counter()
    work = {"holdfast": _holdfast, "mergekit": _mergekit, "floor": _floor}[name](method, folder, target)
    imported_s = time.perf_counter() - started
    peak = PeakMemory()
    started, cpu_started = time.perf_counter(), cpu_seconds()
    work()
    seconds, cpu_s = time.perf_counter() - started, cpu_seconds() - cpu_started
    peak_mb = peak.above_start() / 1e6
    for file in Path(target).glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    durable_s = time.perf_counter() - started
    found = {"seconds": seconds, "durable_s": durable_s, "cpu_s": cpu_s, "peak_mb": peak_mb, "imports_s": imported_s}
    print(json.dumps(found))


def cpu_seconds() -> float:
    """Return the user and system time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def inputs(folder: Path) -> list[Path]:
    return [file for name in ("a", "b", "base") for file in sorted((folder / name).glob("*.safetensors"))]


def _holdfast(method: str, folder: Path, target: str) -> Any:
    import torch  # noqa: F401

    import holdfast
    import holdfast.merging.merge

    models: list[Any] = [folder / "a", folder / "b"]
    if method == "linear":
        return lambda: holdfast.merge([*models, folder / "base"], target, weights=[0.5, 0.3, 0.2])
    densities: dict[str, Any] = {"densities": [0.5, 0.5]} if method != "task_arithmetic" else {}
    return lambda: holdfast.merge(models, target, method=method, base=folder / "base", weights=[0.5, 0.3], **densities)


def _mergekit(method: str, folder: Path, target: str) -> Any:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    names, weights = ("a", "b", "base"), (0.5, 0.3, 0.2)
    models: list[dict[str, Any]] = [
        {"model": str(folder / name), "parameters": {"weight": weight, "density": 0.5}}
        for name, weight in zip(names, weights, strict=True)
    ]
    config: dict[str, Any] = {"merge_method": method, "models": models}
    if method == "linear":
        for model in models:
            del model["parameters"]["density"]
    else:
        config |= {"models": models[:2], "base_model": str(folder / "base")}
    options = MergeOptions(copy_tokenizer=False, quiet=True, random_seed=0, lazy_unpickle=True)
    return lambda: run_merge(MergeConfiguration.model_validate(config), target, options)


def _floor(method: str, folder: Path, target: str) -> Any:
    import torch

    files = [os.open(file, os.O_RDONLY) for file in inputs(folder)]
    size = os.fstat(files[0]).st_size
    threads = os.cpu_count() or 1

    def work() -> None:
        Path(target).mkdir()
        out = os.open(Path(target) / "model.safetensors", os.O_CREAT | os.O_WRONLY | getattr(os, "O_DIRECT", 0))
        os.posix_fallocate(out, 0, size)

        def share(first: int) -> None:
            torch.set_num_threads(1)
            memory = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in files]
            added = [torch.frombuffer(buffer, dtype=torch.bfloat16) for buffer in memory]
            for offset in range(first * BLOCK_BYTES, size, threads * BLOCK_BYTES):
                for file, buffer in zip(files, memory, strict=True):
                    os.preadv(file, [buffer], offset)
                for other in added[1:]:
                    added[0].add_(other)
                os.pwritev(out, [memory[0]], offset)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(share, range(threads)))
        os.ftruncate(out, size)
        os.fsync(out)
        os.close(out)

    return work


class PeakMemory:
    """The largest resident memory of this process from here on, and what it is now."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
        self._start = _status("VmRSS")

    def above_start(self) -> int:
        return _status("VmHWM") - self._start


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def compare(method: str, folder: Path) -> None:
    """Count the tensors whose bits differ."""
    import safetensors.torch
    import torch

    found, expected = (
        {
            key: value
            for file in sorted((folder / f"{method}-{name}").glob("*.safetensors"))
            for key, value in safetensors.torch.load_file(file).items()
        }
        for name in ("holdfast", "mergekit")
    )
    differing = sum((found[key] != expected[key]).sum().item() for key in expected)
    elements = sum(value.numel() for value in expected.values())
    equal = sum(torch.equal(found[key].view(torch.int16), expected[key].view(torch.int16)) for key in expected)
    print(f"{method}: {equal} of {len(expected)} tensors bit-equal, {differing} of {elements} elements differ")


def report(results: dict[str, dict[str, list[dict[str, float]]]], out: Path) -> None:
    medians = {
        method: {
            name: {field: statistics.median(run[field] for run in runs) for field in runs[0]}
            for name, runs in contestants.items()
        }
        for method, contestants in results.items()
    }
    columns = "holdfast s (CPU s) | mergekit s (CPU s; durable s)"
    print(f"| method | {columns} | faster | less CPU | holdfast MB | mergekit MB | less |")
    print("|---|---|---|---|---|---|---|---|")
    for method, of in medians.items():
        ours, theirs = of["holdfast"], of["mergekit"]
        faster, less = theirs["seconds"] / ours["seconds"], theirs["peak_mb"] / ours["peak_mb"]
        cells = [f"{ours['seconds']:.1f} ({ours['cpu_s']:.1f})"]
        cells += [f"{theirs['seconds']:.1f} ({theirs['cpu_s']:.1f}; {theirs['durable_s']:.1f})", f"{faster:.1f}"]
        cells += [f"{theirs['cpu_s'] / ours['cpu_s']:.1f}"]
        cells += [f"{ours['peak_mb']:.0f}", f"{theirs['peak_mb']:.0f}", f"{less:.1f}"]
        print(f"| {method} | {' | '.join(cells)} |")
        if "floor" in of:
            floor = of["floor"]
            cells = [f"{floor['seconds']:.1f} ({floor['cpu_s']:.1f})", "", "", "", f"{floor['peak_mb']:.0f}", "", ""]
            print(f"| floor of {method} | {' | '.join(cells)} |")
        if faster < TARGETS.get(method, 0) or less < MEMORY_TARGET:
            print(f"{method}: below the target of {TARGETS.get(method, 0)} times and {MEMORY_TARGET} times")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"medians": medians, "runs": results, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
