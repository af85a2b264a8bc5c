"""What saves cost a Hugging Face Trainer: its own, and Holdfast's, in extra time per save.

    python -m benchmarks.trainer_stall --hidden 4096 --layers 8 --steps 40 --every 10      # on a GPU

Every round trains the same model without saves, with Trainer's own saves and with Holdfast attached, in turn. An
interval is `every` steps with one save in its middle; the device is waited for at its ends only. The first interval
of each training is left out: steady state. Medians over the intervals of all rounds. A breakdown follows, see
`benchmarks.trainer_stall_parts`: the call, its parts, and the steps that last longer while the save is captured and
written. `--profile` adds the functions of Holdfast's call, `--no-loss-reads` trains without Trainer's read of the loss
after every step, and `--writer-threads` sets the threads that write. Steps are saved under `--folder`: one on
/dev/shm leaves the disk out.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.trainer_stall_parts import (
    TimedParts,
    Timeline,
    breakdown,
    print_breakdown,
    print_call_parts,
    time_saves,
    usual_steps,
)

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
    parser.add_argument("--profile", action="store_true", help="print the functions of Holdfast's call")
    parser.add_argument("--no-loss-reads", action="store_true", help="logging_nan_inf_filter=False")
    parser.add_argument("--writer-threads", type=int, default=None)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    intervals: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    timelines: dict[str, list[Timeline]] = {name: [] for name in CONTESTANTS}
    profile = cProfile.Profile() if arguments.profile else None
    parameters = 0
    for number in range(arguments.rounds):
        order = CONTESTANTS[number % len(CONTESTANTS) :] + CONTESTANTS[: number % len(CONTESTANTS)]
        for name in order:
            timeline = Timeline()
            with TimedParts(timeline):
                parameters, seconds = train_once(name, arguments, timeline, profile if name == "Holdfast" else None)
            intervals[name] += seconds
            timelines[name].append(timeline)
    parts = report_parts(timelines, arguments.every)
    report(arguments, parameters, intervals, parts)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def train_once(name: str, arguments: argparse.Namespace, timeline: Timeline, profile: Any) -> tuple[int, list[float]]:
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
            timeline.step_ends[state.global_step] = time.perf_counter()
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
        logging_nan_inf_filter=not arguments.no_loss_reads,
        report_to="none",
        disable_tqdm=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
    )
    watch = Stopwatch()
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, options, train_dataset=data, callbacks=[watch])
    if name == "Holdfast":
        attach(trainer, on_event=timeline.listen, writer_threads=arguments.writer_threads)
    time_saves(trainer, timeline, profile)
    trainer.train()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    seconds = [after - before for before, after in zip(watch.times, watch.times[1:], strict=False)]
    return sum(parameter.numel() for parameter in model.parameters()), seconds[1:]


def report_parts(timelines: dict[str, list[Timeline]], every: int) -> dict[str, Any]:
    """Print where the extra time of a save goes; return the figures."""
    plain = timelines[CONTESTANTS[0]]
    figures: dict[str, Any] = {"usual_step_s": usual_steps(plain, every)}
    for name in CONTESTANTS[1:]:
        rows = [
            row
            for own, beside in zip(timelines[name], plain, strict=True)
            for row in breakdown(own, usual_steps([beside], every), every)
        ]
        print_breakdown(name, rows)
        figures[name] = rows
    figures["call_parts_ms"] = print_call_parts(timelines["Holdfast"])
    print()
    return figures


def report(
    arguments: argparse.Namespace, parameters: int, intervals: dict[str, list[float]], parts: dict[str, Any]
) -> None:
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
    figures = {"parameters": parameters, "medians_s": medians, "intervals_s": intervals, "parts": parts}
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
