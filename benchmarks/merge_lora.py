"""Merge a LoRA adapter of all linear layers into a Llama of 291M bf16 parameters, beside PEFT's merge_and_unload.

    python -m benchmarks.merge_lora                 # --rounds 5 --rank 16

Each round runs both in turn, each in a process of its own. The clock and the peak memory begin after the imports: PEFT
loads the model and the adapter, merges and saves; Holdfast streams. The weights must be equal, bit for bit. Both read
from the page cache. Holdfast's time has the digests of inputs and output and the fsync of the output; PEFT ends when
its output is in the page cache. With a load from other processes compare the processor time (user and system).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

TARGETS = {"PEFT / Holdfast, seconds": 2.5, "PEFT / Holdfast, CPU": 2.5, "Holdfast / PEFT, peak": 1 / 3}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODEL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 13, "vocab_size": 32000}

MEASURE = """
import resource, sys, time
{imports}
def work(base, adapter, destination):
{body}
before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
work(*sys.argv[1:])
seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(seconds, (after.ru_maxrss - before.ru_maxrss) / 1024, cpu_s)
"""
PEFT = MEASURE.format(
    imports="import torch\nfrom peft import PeftModel\nfrom transformers import LlamaForCausalLM",
    body="""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(destination)
""",
)
HOLDFAST = MEASURE.format(
    imports="from holdfast.merging.lora.merge_lora_call import merge_lora",
    body="    merge_lora(adapter, destination, base=base)",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path("out/bench-merge-lora"))
    parser.add_argument("--json", type=Path, default=Path("out/bench_merge_lora.json"))
    arguments = parser.parse_args()
    root: Path = arguments.folder
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    # Made by a process of its own: what this one holds would be counted to those that it starts.
    process = multiprocessing.get_context("spawn").Process(target=make, args=(root, arguments.rank))
    process.start()
    process.join()
    found: dict[str, list[tuple[float, ...]]] = {"PEFT": [], "Holdfast": []}
    for _ in range(arguments.rounds):
        found["PEFT"].append(measure(PEFT, root, "peft"))
        found["Holdfast"].append(measure(HOLDFAST, root, "holdfast"))
    same = multiprocessing.get_context("spawn").Process(target=check, args=(root,))
    same.start()
    same.join()
    report(found, arguments.json)
    shutil.rmtree(root, ignore_errors=True)
    sys.exit(same.exitcode)


def make(root: Path, rank: int) -> None:
    """Save the base and an adapter of random numbers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields: dict[str, Any] = {**MODEL, "num_attention_heads": 16, "num_key_value_heads": 16}
    model: Any = LlamaForCausalLM(LlamaConfig(**fields))
    model.to(torch.bfloat16).save_pretrained(root / "base")
    tuned: Any = get_peft_model(model, LoraConfig(r=rank, target_modules=LINEAR))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.02)
    tuned.save_pretrained(root / "adapter")


def measure(program: str, root: Path, name: str) -> tuple[float, ...]:
    """Return the seconds, the peak memory in MB and the processor seconds of one merge, without the imports."""
    for file in (root / "base").glob("*.safetensors"):
        with file.open("rb") as opened:
            while opened.read(8 << 20):
                pass
    shutil.rmtree(root / name, ignore_errors=True)
    command = [sys.executable, "-c", program, *(str(root / part) for part in ("base", "adapter", name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return tuple(map(float, done.stdout.split()[-3:]))


def check(root: Path) -> None:
    """Compare the weights of both."""
    import torch
    from safetensors.torch import load_file

    wanted, result = (load_file(root / name / "model.safetensors") for name in ("peft", "holdfast"))
    assert wanted.keys() == result.keys()
    assert all(torch.equal(value, result[key]) for key, value in wanted.items())


def report(found: dict[str, list[tuple[float, ...]]], path: Path) -> None:
    """Print the medians and the ratios."""
    medians = {
        name: tuple(statistics.median(values) for values in zip(*rounds, strict=True)) for name, rounds in found.items()
    }
    for name, (seconds, peak, cpu_s) in medians.items():
        print(f"{name:10} {seconds:6.1f} s {cpu_s:6.1f} CPU s {peak:8.0f} MB above the imports")
    ratios = {
        "PEFT / Holdfast, seconds": medians["PEFT"][0] / medians["Holdfast"][0],
        "PEFT / Holdfast, CPU": medians["PEFT"][2] / medians["Holdfast"][2],
        "Holdfast / PEFT, peak": medians["Holdfast"][1] / medians["PEFT"][1],
    }
    for name, ratio in ratios.items():
        print(f"{name:26} {ratio:.2f} (target {TARGETS[name]:.2f})")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rounds": found, "ratios": ratios}, indent=2) + "\n")


if __name__ == "__main__":
    main()
