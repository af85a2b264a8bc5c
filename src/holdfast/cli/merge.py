"""`holdfast merge`: models and options of a merge, progress and the printed result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.launched import report_on_first_rank
from holdfast.cli.merge_adapters import merge_adapters
from holdfast.cli.render import clean, count, print_json, size_text, written_text
from holdfast.cli.steps import CheckpointPath
from holdfast.convert.torchrun_ranks import launched_rank, launched_ranks
from holdfast.core.errors import InvalidArgument, Mismatch, StorageError, Unsupported
from holdfast.core.terminal import progress_bar

if TYPE_CHECKING:
    from holdfast.merging.merge_forecast import MergeForecast
    from holdfast.merging.merge_options import MergeOptions


@click.command("merge", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("models", metavar="MODEL...", nargs=-1, type=CheckpointPath())
@click.argument("destination", metavar="DST")
@click.option("--config", metavar="FILE", help="A YAML or TOML file in place of models and options; mergekit's, too.")
@click.option("--steps", metavar="N,N,...", help="MODEL is a run: merge these steps of it.")
@click.option("--method", default="linear", show_default=True, help="How to merge; see the list above.")
@click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="ADAPTER",
    type=CheckpointPath(),
    help="Merge a LoRA adapter into MODEL. Repeat.",
)
@click.option("--base", metavar="MODEL", type=CheckpointPath(), help="The model that the others were trained from.")
@click.option("--weight", "weights", multiple=True, metavar="W", help="The weight of a model, in their order. Repeat.")
@click.option("--density", "densities", multiple=True, metavar="D", help="The share of a model's changes to keep.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another parameter of the method. Repeat.")
@click.option("--seed", default=0, show_default=True, help="Seed of random masks.")
@click.option("--rng", default="holdfast", show_default=True, help="Random masks: holdfast, or mergekit's sequence.")
@click.option(
    "--donor",
    metavar="MODEL",
    type=CheckpointPath(),
    help="Whose config and tokenizer to copy. [default: the base, or the first]",
)
@click.option("--dtype", help="Compute in bfloat16, float16, float32 or float64. [default: that of the models]")
@click.option("--out-dtype", help="Store in this dtype. [default: that of the computation]")
@click.option("--remove", multiple=True, metavar="PATTERN", help="Leave out matching keys. Repeatable.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="The maximum size of a file.")
@click.option(
    "--tokens",
    help="If the models have other tokens: union joins by token, donor too but keeps its own, rows ignores it.",
)
@click.option("--dry-run", is_flag=True, help="Only print sizes, problems, memory and time; reads headers, no tensors.")
@click.option("--force", is_flag=True, help="Replace an existing checkpoint at DST atomically.")
@click.option("--no-verify", is_flag=True, help="Do not check the digests of the models.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    models: tuple[str, ...],
    destination: str,
    config: str | None,
    adapters: tuple[str, ...],
    dry_run: bool,
    force: bool,
    no_verify: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Merge models of any format that Holdfast reads into DST, a folder that from_pretrained opens.

    \b
    holdfast merge A B merged --weight 0.7 --weight 0.3
    holdfast merge A B merged --method ties --base BASE --weight 1 --weight 1 --density 0.3 --density 0.3
    holdfast merge A merged --method slerp --base B --set t=0.4
    holdfast merge A merged --method passthrough --remove "*.inv_freq" --out-dtype bfloat16
    holdfast merge runs/llama merged --steps 900,950,1000
    holdfast merge --config merge.yaml merged
    holdfast merge BASE merged --lora ADAPTER --lora ANOTHER --weight 1 --weight 0.5
    torchrun --nproc-per-node 8 -m holdfast merge A B merged --weight 1 --weight 1

    \b
    linear           weighted average of models (weight, normalize=true)
    slerp            spherical interpolation between base and model (t)
    task_arithmetic  base plus weighted changes (weight, lambda=1)
    ties             largest changes that agree in sign (weight, density)
    dare_linear      random changes (weight, density, rescale=true)
    dare_ties        random changes that agree in sign
    della            changes dropped by rank, that agree (density, epsilon=0.15)
    della_linear     changes dropped by rank
    model_stock      average, drawn to the base (filter_wise=false)
    passthrough      one model as it is (scale=1)

    A path may name a checkpoint, or a run's root for its newest step. Tensors are merged a chunk at
    a time, so that the memory does not depend on their size, and DST appears atomically. Config,
    tokenizer and other side files are copied byte for byte from one model, the donor. DST also gets
    merge_record.json: the inputs with their digests, and all options. Values of parameters by key
    pattern, gradients over layers, and slices of layers go into a file: see docs/merge.md. With
    --lora, adapters are merged as PEFT's merge_and_unload does it; MODEL may be left out if the
    adapter names its base: see docs/lora.md. Exit code 0: success. 1: a model is damaged, or a dry
    run found problems. 2: usage error, or the models do not fit together.
    """
    rank, _ = launched_rank()
    context, verify = click.get_current_context(), not no_verify
    with report_on_first_rank(rank):
        if adapters:
            shared = {name: values[name] for name in ("base", "weights", "max_shard_size")}
            flags: dict[str, Any] = {"verify": verify, "force": force, "dry_run": dry_run, "as_json": as_json}
            merge_adapters(context, models, destination, adapters, **flags, **shared)
        else:
            options = _options(models, **values) if config is None else _options_of_file(config, context, models)
            options = replace(options, verify=verify, force=force)
            if not dry_run:
                _merge(options, destination, as_json=as_json)
            elif rank == 0:
                _dry_run(options, destination, as_json=as_json)


def _options(
    models: Sequence[str],
    *,
    steps: str | None,
    base: str | None,
    weights: Sequence[str],
    densities: Sequence[str],
    settings: Sequence[str],
    **options: Any,
) -> MergeOptions:
    from holdfast.merging.merge_call import model_options, steps_of_run, with_values
    from holdfast.merging.merge_options import MergeOptions, settings_of

    parameters = _named(settings)
    if not models:
        raise InvalidArgument("no models: name them before DST, or a file with --config")
    chosen = [model_options(model) for model in models]
    if steps is not None:
        if not all(step.strip().isdigit() for step in steps.split(",")):
            raise InvalidArgument(f"--steps {steps}: expected numbers, such as 900,950,1000")
        chosen = steps_of_run(chosen, [int(step) for step in steps.split(",")])
    for name, given in (("weight", weights), ("density", densities)):
        chosen = with_values(chosen, name, given or None)
    own_base = None if base is None else model_options(base)
    return MergeOptions(models=tuple(chosen), base=own_base, parameters=settings_of(parameters), **options)


def _options_of_file(config: str, context: click.Context, models: Sequence[str]) -> MergeOptions:
    from holdfast.merging.merge_file import BESIDE_MERGEKIT, read_merge_file

    given = _given_options(context)
    beside = {name: context.params[name] for name in given if name in BESIDE_MERGEKIT}
    refused = [*models, *(flag for name, flag in given.items() if name not in beside)]
    if refused:
        raise InvalidArgument(f"{refused[0]}: with --config, write it into the file")
    return read_merge_file(config, beside)


def _merge(options: MergeOptions, destination: str, *, as_json: bool) -> None:
    from holdfast.merging.merge import run_merge

    with launched_ranks() as ranks:

        def show_progress(total: int) -> Any:
            return progress_bar("merging", total // ranks.world if ranks.rank == 0 else 0)

        done = run_merge(options, destination, ranks, show_progress)
    if ranks.rank == 0:
        _print_result(done, as_json=as_json)


def _given_options(context: click.Context) -> dict[str, str]:
    """Return the options on the command line that describe the merge, as their flags by name."""
    apart = ("config", "destination", "dry_run", "force", "no_verify", "as_json", "models")
    return {
        parameter.name: parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in apart
        and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    }


def _dry_run(options: MergeOptions, destination: str, *, as_json: bool) -> None:
    from holdfast.convert.destination import DestinationFolder
    from holdfast.merging.merge import PreparedMerge
    from holdfast.merging.merge_forecast import forecast

    problems: list[str] = []
    try:
        DestinationFolder.at(destination).check_free(force=options.force)
    except (InvalidArgument, StorageError) as error:
        problems.append(str(error))
    found: MergeForecast | None = None
    notes: tuple[str, ...] = ()
    try:
        merge = PreparedMerge(options)
        found, notes = forecast(merge), merge.notes
    except (Mismatch, Unsupported) as error:
        problems.append(str(error))
    if as_json:
        facts = {} if found is None else asdict(found)
        print_json({**facts, "notes": list(notes), "problems": problems})
    else:
        if found is not None:
            _print_forecast(found)
        for note in notes:
            click.echo(clean(f"note: {note}"))
        for problem in problems:
            click.echo(clean(f"would fail: {problem}", keep="\n"))
    raise click.exceptions.Exit(1 if problems else 0)


def _print_forecast(found: MergeForecast) -> None:
    dtypes = ", ".join(f"{name} x{number}" for name, number in found.dtypes.items())
    click.echo(clean(f"{found.method} of {', '.join(found.models)}"))
    click.echo(clean(f"config and tokenizer from {found.donor}"))
    click.echo(
        f"would write {count(found.tensors, 'tensor')} ({dtypes}), {count(found.files, 'tensor file')}, "
        f"{size_text(found.bytes)}"
    )
    click.echo(
        f"would read {size_text(found.read_bytes)}; about {found.seconds:.1f} s with a storage of 1 GB/s, "
        f"and {size_text(found.peak_bytes)} of memory besides the libraries"
    )


def _named(settings: Sequence[str]) -> dict[str, str]:
    out = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals):
            raise InvalidArgument(f"--set {setting}: expected NAME=VALUE, such as --set normalize=false")
        out[name.strip()] = value
    return out


def _print_result(done: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    for note in done.notes:
        click.echo(clean(f"note: {note}"))
    click.echo(clean(f"wrote {done.path}: {count(done.tensors, 'tensor')} by {done.method}, {written_text(done)}"))
    click.echo(clean(f'open it with: AutoModelForCausalLM.from_pretrained("{done.path}")'))
