"""`holdfast train`: train a model on any layout, from a config; resumes by itself."""

from __future__ import annotations

import faulthandler
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from holdfast.core.errors import InvalidArgument

if TYPE_CHECKING:
    from holdfast.train.config import RunConfig
    from holdfast.train.loop import Progress, RunResult, Watcher

    Run = Callable[[Watcher], RunResult]

_LINES = 20  # how many lines a whole run prints where there is no terminal


@click.command("train", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config_path", metavar="CONFIG.toml")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Put a setting over the config's.")
@click.option("--nproc", type=click.IntRange(1), help="Start so many ranks on this machine, by torchrun.")
@click.option("--check", is_flag=True, help="Check config, layout and batch sizes for --nproc ranks, and leave.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per step, and one for the outcome.")
def command(config_path: str, sets: tuple[str, ...], nproc: int | None, check: bool, as_json: bool) -> None:
    """Train as CONFIG.toml says; a run that was stopped or killed goes on where its last checkpoint is.

    \b
    holdfast train examples/dense-tiny.toml
    holdfast train examples/moe-tiny.toml --nproc 4
    holdfast train examples/moe-tiny.toml --nproc 4 --set layout.ep=1 --set layout.dp_shard=2 --set layout.tp=2
    torchrun --nnodes 2 --nproc-per-node 8 -m holdfast train big.toml      the same on two machines

    The config has a section for each component, and all but [model] may be left out:

    \b
    [model]       family (llama, qwen2, qwen3, qwen2_moe, qwen3_moe) and sizes, by Hugging Face's names
    [layout]      dp_replicate x dp_shard x tp x pp ranks; ep within dp; zero1; schedule, stages_per_rank
    [data]        kind (tokens: a flat file of ids; text: any file, byte by byte; synthetic), path, dtype
                  (uint16, uint32), sequence, samples (of synthetic), evaluation_samples, seed
    [optimizer]   lr, beta1, beta2, eps, weight_decay, clip
    [schedule]    kind (cosine, linear, constant), warmup_steps, floor
    [train]       folder, steps, global_batch, micro_batch, accumulation, seed, dtype, evaluate_every, start_from
    [checkpoint]  every_steps, every_seconds, keep_last, keep_every, model_dtype
    [ema]         decay, every, device

    The layout may change between two starts: weights, optimizer, average and place in the data
    follow. The run's folder gets config.toml, metrics.jsonl, curve.png and checkpoints/, which
    transformers opens as they are. SIGTERM saves, and ends the run; Ctrl-C ends it without a save.
    Steps, learning rates and other settings of [optimizer], [schedule] and [checkpoint] are the
    config's at every start; another [model] or other [data] is refused.
    """
    from holdfast.train.config import check_run, read_config

    config = read_config(config_path, sets)
    if check:
        _check(config, nproc)
    elif nproc is not None and nproc > 1:
        from holdfast.train.launch import run_local_ranks

        check_run(config, nproc)
        given = [part for assignment in sets for part in ("--set", assignment)]
        code = run_local_ranks(nproc, ["train", config_path, *given, *(["--json"] if as_json else [])])
        if code:
            sys.exit(code)
    else:
        _train(config, as_json)


def _check(config: RunConfig, nproc: int | None) -> None:
    """Everything that can be wrong before ranks start."""
    from holdfast.train.config import check_run

    batches = check_run(config, nproc or config.layout.world)
    click.echo(f"{config.model.family} on {config.layout}: {config.layout.world} ranks")
    click.echo(
        f"global batch {batches.global_batch} = micro batch {batches.micro_batch} x accumulation "
        f"{batches.accumulation} x data parallel {batches.data_parallel}"
    )


def _train(config: RunConfig, as_json: bool) -> None:
    from holdfast.train.config import check_run
    from holdfast.train.launch import is_rank, pick_device, process_group
    from holdfast.train.loop import Trainer

    if not is_rank() and config.layout.world > 1:
        world = config.layout.world
        check_run(config, world)  # what is wrong on any number of ranks comes first
        raise InvalidArgument(
            f"layout {config.layout} takes {world} ranks, and this is one process: start it with --nproc {world}, "
            "or under torchrun"
        )
    if is_rank() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a rank that dies in native code says where
    warnings.filterwarnings("ignore", module="torch")
    device = pick_device(config.train.device)
    with process_group(device):
        trainer = Trainer(config, device)
        if trainer.is_first and not as_json:
            click.echo(f"{config.model.family} on {config.layout}, {device.type}: {config.train.folder}")
        if not trainer.is_first:
            trainer.run()
        elif as_json:
            outcome = trainer.run(_print_json)
            click.echo(json.dumps({"outcome": asdict(outcome)}))
        elif sys.stdout.isatty():
            _told(config, _with_bar(config, trainer.run))
        else:
            _told(config, trainer.run(_Lines().print))


def _print_json(progress: Progress) -> None:
    from holdfast.train.metrics import finite_or_none

    click.echo(json.dumps({name: finite_or_none(value) for name, value in asdict(progress).items()}))


class _Lines:
    """A line for the first step of this start, for the last, and for some between."""

    def __init__(self) -> None:
        self._begun = False

    def print(self, progress: Progress) -> None:
        every = max(1, progress.steps // _LINES)
        if self._begun and progress.step % every and progress.step != progress.steps:
            return
        if not self._begun and progress.step > 1:
            click.echo(f"goes on from step {progress.step - 1}")
        self._begun = True
        click.echo(
            f"step {progress.step:>{len(str(progress.steps))}}  loss {progress.loss:.4f}  lr {progress.lr:.2e}  "
            f"norm {progress.gradient_norm:.2f}  {progress.tokens_per_s:,.0f} tokens/s"
        )


def _with_bar(config: RunConfig, run: Run) -> RunResult:
    from rich import progress as rich

    columns = (rich.TextColumn("step"), rich.MofNCompleteColumn(), rich.BarColumn())
    with rich.Progress(*columns, rich.TextColumn("{task.description}"), rich.TimeRemainingColumn()) as bar:
        task = bar.add_task("starting", total=config.train.steps)

        def watch(progress: Progress) -> None:
            words = f"loss {progress.loss:.4f}  {progress.tokens_per_s:,.0f} tokens/s"
            bar.update(task, completed=progress.step, description=words)

        return run(watch)


def _told(config: RunConfig, outcome: RunResult) -> None:
    steps, folder = config.train.steps, config.train.folder
    if outcome.resumed_from >= steps:
        click.echo(f"nothing to do: {folder} is at step {outcome.resumed_from}, and train.steps={steps}")
        return
    resumed = f", resumed at step {outcome.resumed_from}" if outcome.resumed_from else ""
    cut = " (a signal cut it short)" if outcome.preempted and outcome.step < steps else ""
    click.echo(f"step {outcome.step} of {steps}{resumed}{cut}: see {folder}, and `holdfast ls {folder}/checkpoints`")
