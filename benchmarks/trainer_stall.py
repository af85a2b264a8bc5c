"""What saves cost a Hugging Face Trainer: its own, and Holdfast's, in extra time per save.

    python -m benchmarks.trainer_stall --hidden 4096 --layers 8 --steps 40 --every 10      # on a GPU

Every round trains the same model without saves, with Trainer's own saves and with Holdfast attached, in turn. An
interval is `every` steps with one save in its middle; the device is waited for at its ends only. The first interval
of each training is left out: steady state. Medians over the intervals of all rounds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

CONTESTANTS = ("no saves", "Trainer", "Holdfast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("out/trainer-stall"))
    parser.add_argument("--json", type=Path, default=Path("out/bench_trainer_stall.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    intervals: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    parameters = 0
    for number in range(arguments.rounds):
        order = CONTESTANTS[number % len(CONTESTANTS) :] + CONTESTANTS[: number % len(CONTESTANTS)]
        for name in order:
            parameters, seconds = train_once(name, arguments)
            intervals[name] += seconds
    report(arguments, parameters, intervals)


def train_once(name: str, arguments: argparse.Namespace) -> tuple[int, list[float]]:
    """Train once; return the number of parameters and the seconds of each interval but the first."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from holdfast.integrations.transformers import attach

    on_gpu = torch.cuda.is_available()

    class Stopwatch(TrainerCallback):
        """Reads the clock in the middle between two saves."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % arguments.every == arguments.every // 2:
                if on_gpu:
                    torch.cuda.synchronize()
                self.times.append(time.perf_counter())

    shutil.rmtree(arguments.folder, ignore_errors=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=max(1, arguments.hidden // 64),
        num_key_value_heads=max(1, arguments.hidden // 64),
        vocab_size=8192,
    )
    model = LlamaForCausalLM(config)
    rows = torch.randint(0, 8192, (arguments.steps * arguments.batch, arguments.length))
    options = TrainingArguments(
        output_dir=str(arguments.folder),
        per_device_train_batch_size=arguments.batch,
        max_steps=arguments.steps,
        save_strategy="no" if name == "no saves" else "steps",
        save_steps=arguments.every,
        save_total_limit=2,
        logging_steps=arguments.every,
        report_to="none",
        disable_tqdm=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    )
    watch = Stopwatch()
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, options, train_dataset=data, callbacks=[watch])
    if name == "Holdfast":
        attach(trainer)
    trainer.train()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    seconds = [after - before for before, after in zip(watch.times, watch.times[1:], strict=False)]
    return sum(parameter.numel() for parameter in model.parameters()), seconds[1:]


def report(arguments: argparse.Namespace, parameters: int, intervals: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in intervals.items()}
    plain = medians["no saves"]
    spread = {name: max(seconds) - min(seconds) for name, seconds in intervals.items()}
    state_gb = parameters * 12 / 1e9
    print(f"{parameters / 1e6:.0f} M parameters, {state_gb:.2f} GB with AdamW; {arguments.every} steps between saves")
    print(f"{'':10} {'interval s':>11} {'extra per save ms':>18} {'spread ms':>10} {'intervals':>9}")
    for name in CONTESTANTS:
        extra_ms = (medians[name] - plain) * 1000
        count = len(intervals[name])
        print(f"{name:10} {medians[name]:11.3f} {extra_ms:18.1f} {spread[name] * 1000:10.1f} {count:9}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    figures = {"parameters": parameters, "medians_s": medians, "intervals_s": intervals}
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
