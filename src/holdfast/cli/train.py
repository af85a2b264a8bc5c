"""`holdfast train`: train from a config on any layout; check only, start local ranks, print progress and outcome."""

from __future__ import annotations

import faulthandler
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.render import clean
from holdfast.core.errors import InvalidArgument
from holdfast.core.torch_needed import require_torch

if TYPE_CHECKING:
    from holdfast.train.config import RunConfig
    from holdfast.train.embedding.trainer.embedding_config import EmbeddingConfig
    from holdfast.train.training_run import Progress, RunResult, TrainingRun

    AnyConfig = RunConfig | EmbeddingConfig

_LINES = 20  # printed by a whole run if stdout is not a terminal


@click.command("train", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("config_path", metavar="CONFIG.toml")
@click.option(
    "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a setting of the config. Repeatable."
)
@click.option("--nproc", type=click.IntRange(1), help="Start this many ranks on this machine with torchrun.")
@click.option("--check", is_flag=True, help="Check config, layout and batch sizes for --nproc ranks, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per step, and one for the outcome.")
def command(config_path: str, sets: tuple[str, ...], nproc: int | None, check: bool, as_json: bool) -> None:
    """Train as configured in CONFIG.toml. A stopped or killed run resumes from its last checkpoint.

    \b
    holdfast train examples/dense-tiny.toml
    holdfast train examples/moe-tiny.toml --nproc 4
    holdfast train examples/moe-tiny.toml --nproc 4 --set layout.ep=1 --set layout.dp_shard=2 --set layout.tp=2
    holdfast train examples/embedding-tiny.toml              an embedding model
    torchrun --nnodes 2 --nproc-per-node 8 -m holdfast train big.toml      on two machines

    The config has one section per component. All sections except [model] are optional:

    \b
    [model]       family (llama, qwen2, qwen3, qwen2_moe, qwen3_moe) and sizes, with Hugging Face's names
    [layout]      dp_replicate x dp_shard x tp x pp ranks; ep within dp; zero1; schedule, stages_per_rank
    [data]        kind (tokens: a flat file of ids; text: any file, byte by byte; synthetic), path, dtype
                  (uint16, uint32), sequence, samples (of synthetic), evaluation_samples, seed
    [optimizer]   lr, beta1, beta2, eps, weight_decay, clip
    [schedule]    kind (cosine, linear, constant), warmup_steps, floor
    [train]       folder, steps, global_batch, micro_batch, accumulation, seed, dtype, evaluate_every, start_from
    [checkpoint]  every_steps, every_seconds, keep_last, keep_every, model_dtype
    [ema]         decay, every, device

    A config with a section [embedding] trains an embedding model. These sections differ then:

    \b
    [embedding]   pooling, causal, normalize, prompts, include_prompt, max_length, dims (Matryoshka)
    [model]       as above, or encoder (a folder with a model of transformers, such as BERT) and changes
    [loss]        kind (infonce, cosent, margin_mse, kl), temperature, learned, directions, joint, margin
    [data]        tokenizer (a folder), seed; [[data.sets]]: files (.jsonl, .parquet), weight, negatives
    [train]       global_batch: rows that are compared; micro_batch or micro_tokens: encoded at once;
                  start_from: also gives sizes, tokenizer and [embedding] where these are left out
    [evaluation]  batch, recall_at; [[evaluation.sets]]: name, kind (retrieval, similarity), rows

    The layout may change between starts. Weights, optimizer, average and position in the data are
    resharded. The run's folder gets config.toml, metrics.jsonl, curve.png and checkpoints/, which
    transformers can open directly. SIGTERM saves and ends the run; Ctrl-C ends it without saving.
    Steps, learning rates and other settings of [optimizer], [schedule] and [checkpoint] are read
    from the config at every start. A different [model] or different [data] is refused.
    """
    from holdfast.train.open_run import open_run

    config = open_run(config_path, sets)
    if check:
        _check(config, nproc)
        return
    require_torch("holdfast train")
    if nproc is not None and nproc > 1:
        from holdfast.train.launch import run_local_ranks

        _checked(config, nproc)
        overrides = [part for assignment in sets for part in ("--set", assignment)]
        code = run_local_ranks(nproc, ["train", config_path, *overrides, *(["--json"] if as_json else [])])
        if code:
            sys.exit(code)
    else:
        _train(config, as_json)


def _check(config: AnyConfig, nproc: int | None) -> None:
    """Check everything that can fail before ranks start, and print the layout and batch sizes."""
    batches = _checked(config, nproc or config.layout.world)
    click.echo(f"{config.model.family} on {config.layout}: {config.layout.world} ranks")
    click.echo(batches)


def _checked(config: AnyConfig, world: int) -> str:
    """Check the config on this number of ranks, and describe its batches."""
    from holdfast.train.config import RunConfig, check_run

    if not isinstance(config, RunConfig):
        config.check(world)
        return config.describe()
    batches = check_run(config, world)
    return (
        f"global batch {batches.global_batch} = micro batch {batches.micro_batch} x accumulation "
        f"{batches.accumulation} x data parallel {batches.data_parallel}"
    )


def _make_trainer(config: AnyConfig, device: Any) -> TrainingRun:
    from holdfast.train.config import RunConfig

    if isinstance(config, RunConfig):
        from holdfast.train.loop import Trainer

        return Trainer(config, device)
    from holdfast.train.embedding.trainer import EmbeddingTrainer

    return EmbeddingTrainer(config, device)


def _train(config: AnyConfig, as_json: bool) -> None:
    from holdfast.train.launch import is_rank, pick_device, process_group

    if not is_rank() and config.layout.world > 1:
        world = config.layout.world
        _checked(config, world)  # errors that do not depend on the number of ranks come first
        raise InvalidArgument(
            f"layout {config.layout} needs {world} ranks, but this is a single process; use --nproc {world} or torchrun"
        )
    if is_rank() and sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # prints a traceback if a rank crashes in native code
    warnings.filterwarnings("ignore", module="torch")
    device = pick_device(config.train.device)
    with process_group(device):
        trainer = _make_trainer(config, device)
        if trainer.is_first and not as_json:
            click.echo(f"{config.model.family} on {config.layout}, {device.type}: {config.train.folder}")
        if not trainer.is_first:
            trainer.run()
        elif as_json:
            outcome = trainer.run(_print_json)
            click.echo(json.dumps({"outcome": asdict(outcome)}))
        elif sys.stdout.isatty():
            _print_outcome(config, _with_bar(config, trainer))
        else:
            trainer.notice = _print_notice
            _print_outcome(config, trainer.run(_LinePrinter().print))


def _print_json(progress: Progress) -> None:
    from holdfast.train.metrics import finite_or_none

    click.echo(json.dumps({name: finite_or_none(value) for name, value in asdict(progress).items()}))


class _LinePrinter:
    """Prints a line for the first and last step of this start, and for some steps in between."""

    def __init__(self) -> None:
        self._started = False

    def print(self, progress: Progress) -> None:
        every = max(1, progress.steps // _LINES)
        if self._started and progress.step % every and progress.step != progress.steps:
            return
        if not self._started and progress.step > 1:
            click.echo(f"resumed from step {progress.step - 1}")
        self._started = True
        click.echo(
            f"step {progress.step:>{len(str(progress.steps))}}  loss {progress.loss:.4f}  lr {progress.lr:.2e}  "
            f"norm {progress.gradient_norm:.2f}  {progress.tokens_per_s:,.0f} tokens/s"
        )


def _print_notice(name: str, step: int, values: Mapping[str, Any]) -> None:
    if text := _notice(name, step, values):
        click.echo(text)


def _notice(name: str, step: int, values: Mapping[str, Any]) -> str:
    """Return a line about an evaluation or a save, "" for other events."""
    if name == "evaluated":
        if "loss" not in values:
            measures = ", ".join(f"{measure} {value:.4f}" for measure, value in values.items())
            return f"step {step}  evaluation {measures}"
        average = f", of the average {values['ema_loss']:.4f}" if "ema_loss" in values else ""
        return f"step {step}  evaluation loss {values['loss']:.4f}{average}"
    if name == "save":
        return f"step {step}  saving in the background: the loop waited {values['stall_ms']:.1f} ms"
    if name == "published":
        return f"step {step}  saved in {values['seconds']:.2f} s"
    if name in ("failed", "skipped"):
        what = "NOT SAVED" if name == "failed" else "save skipped"
        return clean(f"step {step}  {what}: {values['detail']}")
    return ""


def _with_bar(config: AnyConfig, trainer: TrainingRun) -> RunResult:
    from rich import progress as rich

    columns = (rich.TextColumn("step"), rich.MofNCompleteColumn(), rich.BarColumn())
    with rich.Progress(*columns, rich.TextColumn("{task.description}"), rich.TimeRemainingColumn()) as bar:
        task = bar.add_task("starting", total=config.train.steps)

        def watch(progress: Progress) -> None:
            text = f"loss {progress.loss:.4f}  {progress.tokens_per_s:,.0f} tokens/s"
            bar.update(task, completed=progress.step, description=text)

        def show(name: str, step: int, values: Mapping[str, Any]) -> None:
            if text := _notice(name, step, values):
                bar.console.print(text, markup=False, highlight=False)

        trainer.notice = show
        return trainer.run(watch)


def _print_outcome(config: AnyConfig, outcome: RunResult) -> None:
    steps, folder = config.train.steps, config.train.folder
    if outcome.resumed_from >= steps:
        click.echo(f"nothing to do: {folder} is already at step {outcome.resumed_from}, train.steps={steps}")
        return
    resumed = f", resumed at step {outcome.resumed_from}" if outcome.resumed_from else ""
    stopped = " (stopped by a signal)" if outcome.preempted and outcome.step < steps else ""
    click.echo(
        f"step {outcome.step} of {steps}{resumed}{stopped}: see {folder}, and `holdfast ls {folder}/checkpoints`"
    )
