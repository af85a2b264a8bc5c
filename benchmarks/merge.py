"""Merge three models of about 291 million parameters in bfloat16, beside mergekit on the same files.

    python -m benchmarks.merge [--rounds 5] [--methods linear ties]

Every round does each contestant once, in turn, each in a process of its own; the table shows medians. The time to
start the interpreter and import the libraries is taken apart: a process imports, notes its memory, and then merges.
Peak memory is that of the process above the memory after the imports, as the kernel counts it. mergekit's `linear`
is given the same weights, and its result is compared bit for bit.
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
        results[method] = {"holdfast": [], "mergekit": []}
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
    time.sleep(SETTLE_S)
    arguments = ["--contestant", name, method, str(target), "--folder", str(folder)]
    command = [sys.executable, "-m", "benchmarks.merge", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    os.sync()
    return dict(json.loads(done.stdout.splitlines()[-1]))


def contest(name: str, method: str, target: str, *, folder: Path) -> None:
    """Import, then merge; print the seconds and the peak of the memory above that after the imports."""
    started = time.perf_counter()
    work = (_holdfast if name == "holdfast" else _mergekit)(method, folder, target)
    imported_s = time.perf_counter() - started
    peak = PeakMemory()
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    print(
        json.dumps({"seconds": seconds, "cpu_s": cpu_s, "peak_mb": peak.above_start() / 1e6, "imports_s": imported_s})
    )


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
    print("| method | holdfast s (CPU s) | mergekit s (CPU s) | faster | holdfast MB | mergekit MB | less |")
    print("|---|---|---|---|---|---|---|")
    for method, of in medians.items():
        ours, theirs = of["holdfast"], of["mergekit"]
        faster, less = theirs["seconds"] / ours["seconds"], theirs["peak_mb"] / ours["peak_mb"]
        cells = [f"{one['seconds']:.1f} ({one['cpu_s']:.1f})" for one in (ours, theirs)] + [f"{faster:.1f}"]
        cells += [f"{ours['peak_mb']:.0f}", f"{theirs['peak_mb']:.0f}", f"{less:.1f}"]
        print(f"| {method} | {' | '.join(cells)} |")
        if faster < TARGETS.get(method, 0) or less < MEMORY_TARGET:
            print(f"{method}: below the target of {TARGETS.get(method, 0)} times and {MEMORY_TARGET} times")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"medians": medians, "runs": results, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
