"""Convert a Llama-shaped checkpoint, separate to fused qkv and back, beside `cp` and fsync of the same bytes.

    make bench                       # or: python -m benchmarks.convert --gigabytes 4

Every round does each contestant once, in turn; the table shows medians and the ratios. Each
conversion runs in a process of its own, whose peak memory is counted with the interpreter's. At the
end the second conversion must have given back every byte of the start.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 4096, 32, 8, 128, 11008, 32000
TARGETS = {"to fused / cp": 1.5, "back / cp": 1.5, "peak MB": 400.0}
SETTLE_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("out/bench-convert"))
    parser.add_argument("--json", type=Path, default=Path("out/bench_convert.json"))
    arguments = parser.parse_args()
    root: Path = arguments.folder
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    start, fused, back, copied = (root / name for name in ("start", "fused", "back", "copied"))
    (root / "fused.aoa").write_text(fused_qkv())
    # Made by a process of its own: what this one holds would be counted to those that it starts.
    process = multiprocessing.get_context("spawn").Process(target=make, args=(start, arguments.gigabytes))
    process.start()
    process.join()
    seconds: dict[str, list[float]] = {"cp": [], "to fused": [], "back": []}
    peaks: list[float] = []
    for _ in range(arguments.rounds):
        seconds["cp"].append(timed(lambda: copy(start, copied), copied))
        peaks.append(contest("to fused", seconds, fused, start, root))
        peaks.append(contest("back", seconds, back, fused, root, "--reverse"))
    check(start, back)
    report(arguments, seconds, max(peaks), sum(path.stat().st_size for path in start.iterdir()))
    shutil.rmtree(root, ignore_errors=True)


def contest(name: str, seconds: dict[str, list[float]], target: Path, source: Path, root: Path, *more: str) -> float:
    peak: list[float] = []
    command = ["convert", str(source), str(target), "--map", str(root / "fused.aoa"), *more]
    seconds[name].append(timed(lambda: peak.append(run(command)), target))
    return peak[0]


def timed(work: Callable[[], None], target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()  # what the contestant before left is the disk's business no more
    time.sleep(SETTLE_S)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in (*target.iterdir(), target):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def run(command: list[str]) -> float:
    """Run the command line; its peak memory in MB."""
    process = subprocess.Popen([sys.executable, "-m", "holdfast", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"holdfast {' '.join(command)}: exit code {process.returncode}")
    return usage.ru_maxrss / 1000


def make(path: Path, gigabytes: float) -> None:
    """Write a Llama-shaped checkpoint of random bf16."""
    import numpy as np
    import torch

    import holdfast

    shapes = dict(layer_shapes())
    layer_bytes = 2 * sum(rows * columns for rows, columns in shapes.values())
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / layer_bytes))
    random = np.random.default_rng(1)

    def tensor(*shape: int) -> torch.Tensor:
        data = random.integers(0, 2**14, shape, dtype=np.int16)
        return torch.from_numpy(data).view(torch.bfloat16)

    model = {"model.embed_tokens.weight": tensor(VOCABULARY, HIDDEN), "lm_head.weight": tensor(VOCABULARY, HIDDEN)}
    model["model.norm.weight"] = tensor(HIDDEN)
    for layer in range(layers):
        model |= {f"model.layers.{layer}.{name}": tensor(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            model[f"model.layers.{layer}.{name}.weight"] = tensor(HIDDEN)
    holdfast.save(path, {"model": model})


def layer_shapes() -> Iterator[tuple[str, tuple[int, int]]]:
    yield "self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
    yield "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
    yield "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
    yield "self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
    yield "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
    yield "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
    yield "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)


def fused_qkv() -> str:
    name = "model.layers.$LAYER_ID.self_attn"
    parts = ", ".join(f"{name}.{part}_proj.weight" for part in "qkv")
    options = f"fused_qkv, num_heads={HEADS}, num_key_value_groups={KV_HEADS}, axis=0"
    return f"{parts} -> {name}.qkv_proj.weight, {options}\n"


def check(start: Path, back: Path) -> None:
    files = [path.name for path in start.iterdir() if path.name != "holdfast.json"]
    same, different, missing = filecmp.cmpfiles(start, back, files, shallow=False)
    if different or missing or len(same) != len(files):
        raise SystemExit(f"there and back changed {different or missing}")


def report(arguments: argparse.Namespace, seconds: dict[str, list[float]], peak: float, total: int) -> None:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    figures = {"to fused / cp": median["to fused"] / median["cp"], "back / cp": median["back"] / median["cp"]}
    figures["peak MB"] = peak
    print(
        f"\n{total / 1e9:.2f} GB, separate to fused qkv and back, {arguments.rounds} rounds, medians; bytes as before\n"
    )
    for name, values in seconds.items():
        print(f"  {name:12} {median[name]:7.3f} s   ({min(values):.3f} to {max(values):.3f})")
    print()
    for name, target in TARGETS.items():
        verdict = "ok" if figures[name] <= target else "MISSED"
        print(f"  {name:16} {figures[name]:8.2f}   wanted <= {target:g}   {verdict}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"bytes": total, "seconds": seconds, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
