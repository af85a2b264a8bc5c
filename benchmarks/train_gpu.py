"""How much of a GPU's matrix rate a training run gets, and what saves while it runs cost.

    python -m benchmarks.train_gpu                  # needs a CUDA device with some 60 GB
    python -m benchmarks.train_gpu --tiny           # the same on a CPU, to see that it runs

A dense decoder of about one billion parameters trains in bf16 with fp32 parameters and AdamW.
The matrix rate is that of large bf16 products, measured here. The work of a step counts six
operations per matrix parameter and token, and attention's two products; nothing that is
computed again counts. Rounds of 20 steps with a save in the middle alternate with rounds without.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import holdfast
from holdfast.train.layout import Layout
from holdfast.train.loss import MicroBatch
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.parallel_model import build

SAVE_EVERY = 20


def sized(tiny: bool) -> ModelConfig:
    if tiny:
        return ModelConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    return ModelConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=16,
        num_key_value_heads=8,
    )


def finish(device: torch.device) -> None:
    """Wait for what the caller's own stream was given."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def matrix_rate(device: torch.device, size: int) -> float:
    """Operations per second of square bf16 products, the best of several rounds."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(6):
        finish(device)
        began = time.perf_counter()
        for _ in range(10):
            torch.mm(a, b)
        finish(device)
        rates.append(10 * 2 * size**3 / (time.perf_counter() - began))
    return max(rates)


def step_work(config: ModelConfig, parameters: int, batch: int, length: int) -> float:
    """Operations of forward and backward: causal attention sees half of all pairs."""
    matrices = parameters - config.vocab_size * config.hidden_size  # looking a word up is no product
    heads = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * heads * length
    return batch * length * (6 * matrices + attention)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds per step of some steps, and how long each save among them held the caller."""

    step_s: float
    stalls_ms: list[float]


class Run:
    def __init__(self, config: ModelConfig, device: torch.device, batch: int, length: int) -> None:
        self.device = device
        self.replica = build(config, Layout(), device, torch.bfloat16)
        self.optimizer = self.replica.make_optimizer(lr=1e-4, fused=True)
        ids = torch.randint(0, config.vocab_size, (batch, length + 1), device=device)
        self.batch = MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        self.number = 0

    def round(self, count: int, checkpointer: holdfast.Checkpointer | None = None) -> Round:
        """So many steps; with a checkpointer, the state is saved in the middle and written beside the rest.

        The clock waits for the work of the steps, not for the device: a copy that is still under way
        on a stream of its own holds nobody up, unless the steps after it have to wait for it.
        """
        stalls = []
        finish(self.device)
        began = time.perf_counter()
        for number in range(count):
            self.replica.forward_backward([self.batch])
            self.replica.clip(1.0)
            self.optimizer.step()
            self.number += 1
            if checkpointer is not None and number == count // 2:
                stalls.append(checkpointer.save(self.number, self.replica.state()).stall_ms)
        finish(self.device)
        return Round((time.perf_counter() - began) / count, stalls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("out/train_gpu"))
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    batch, length = (2, 64) if options.tiny else (options.batch, options.length)
    config = sized(options.tiny)
    rate = matrix_rate(device, 512 if options.tiny else 8192)
    run = Run(config, device, batch, length)
    run.round(5)
    shutil.rmtree(options.folder, ignore_errors=True)
    plain: list[Round] = []
    saved: list[Round] = []
    with holdfast.Checkpointer(options.folder, keep=holdfast.keep.last(1)) as checkpointer:
        checkpointer.prepare(run.replica.state())
        run.round(SAVE_EVERY, checkpointer)  # the first save is apart: it takes memory
        for _ in range(options.rounds):
            plain.append(run.round(SAVE_EVERY))
            saved.append(run.round(SAVE_EVERY, checkpointer))
    shutil.rmtree(options.folder, ignore_errors=True)
    parameters = sum(p.numel() for p in run.replica.module.parameters())
    step_s = statistics.median(each.step_s for each in plain)
    costs = [with_save.step_s / without.step_s - 1 for without, with_save in zip(plain, saved, strict=True)]
    told = {
        "torch": torch.__version__,
        "parameters": parameters,
        "tokens_per_step": batch * length,
        "step_ms": round(step_s * 1000, 2),
        "tokens_per_s": round(batch * length / step_s),
        "matrix_tflops": round(rate / 1e12, 1),
        "training_tflops": round(step_work(config, parameters, batch, length) / step_s / 1e12, 1),
        "share_of_matrix_rate": round(step_work(config, parameters, batch, length) / step_s / rate, 3),
        "save_cost_percent": round(100 * statistics.median(costs), 3),
        "save_cost_percent_of_rounds": [round(100 * cost, 3) for cost in costs],
        "save_stall_ms": [round(stall, 2) for each in saved for stall in each.stalls_ms],
    }
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
