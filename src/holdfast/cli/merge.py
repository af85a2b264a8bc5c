"""`holdfast merge`: models and options of a merge, progress and the printed result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from holdfast.cli.launched import report_on_first_rank
from holdfast.cli.render import clean, count, print_json, size_text
from holdfast.convert.torchrun_ranks import launched_rank, launched_ranks
from holdfast.core.errors import InvalidArgument
from holdfast.core.terminal import progress_bar


@click.command("merge", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.argument("destination", metavar="DST")
@click.option("--method", default="linear", show_default=True, help="How to merge; see the list above.")
@click.option("--base", metavar="MODEL", help="The model that the others were trained from.")
@click.option("--weight", "weights", multiple=True, metavar="W", help="The weight of a model, in their order. Repeat.")
@click.option("--density", "densities", multiple=True, metavar="D", help="The share of a model's changes to keep.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Another parameter of the method. Repeat.")
@click.option("--seed", default=0, show_default=True, help="Seed of random masks.")
@click.option("--rng", default="holdfast", show_default=True, help="Random masks: holdfast, or mergekit's sequence.")
@click.option("--donor", metavar="MODEL", help="Whose config and tokenizer to copy. [default: the base, or the first]")
@click.option("--dtype", help="Compute in bfloat16, float16, float32 or float64. [default: that of the models]")
@click.option("--out-dtype", help="Store in this dtype. [default: that of the computation]")
@click.option("--remove", multiple=True, metavar="PATTERN", help="Leave out matching keys. Repeatable.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="The maximum size of a file.")
@click.option("--force", is_flag=True, help="Replace an existing checkpoint at DST atomically.")
@click.option("--no-verify", is_flag=True, help="Do not check the digests of the models.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    models: tuple[str, ...],
    destination: str,
    method: str,
    base: str | None,
    weights: tuple[str, ...],
    densities: tuple[str, ...],
    settings: tuple[str, ...],
    seed: int,
    rng: str,
    donor: str | None,
    dtype: str | None,
    out_dtype: str | None,
    remove: tuple[str, ...],
    max_shard_size: str,
    force: bool,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Merge models of any format that Holdfast reads into DST, a folder that from_pretrained opens.

    \b
    holdfast merge A B merged --weight 0.7 --weight 0.3
    holdfast merge A B merged --method ties --base BASE --weight 1 --weight 1 --density 0.3 --density 0.3
    holdfast merge A merged --method slerp --base B --set t=0.4
    holdfast merge A merged --method passthrough --remove "*.inv_freq" --out-dtype bfloat16
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
    merge_record.json: the inputs with their digests, and all options. Exit code 0: success. 1: a
    model is damaged. 2: usage error, or the models do not fit together.
    """
    rank, _ = launched_rank()
    with report_on_first_rank(rank):
        from holdfast.merging.merge import Merged, run_merge
        from holdfast.merging.merge_call import model_options, with_values
        from holdfast.merging.merge_options import MergeOptions, settings_of

        chosen = [model_options(model) for model in models]
        for name, values in (("weight", weights), ("density", densities)):
            chosen = with_values(chosen, name, values or None)
        options = MergeOptions(
            models=tuple(chosen),
            method=method,
            base=None if base is None else model_options(base),
            parameters=settings_of(_named(settings)),
            donor=donor,
            seed=seed,
            rng=rng,
            dtype=dtype,
            out_dtype=out_dtype,
            remove=remove,
            max_shard_size=max_shard_size,
            verify=not no_verify,
            force=force,
        )
        with launched_ranks() as ranks:

            def show_progress(total: int) -> Any:
                return progress_bar("merging", total // ranks.world if ranks.rank == 0 else 0)

            done: Merged = run_merge(options, destination, ranks, show_progress)
        if rank == 0:
            _print_result(done, as_json=as_json)


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
    rate = size_text(done.bytes / max(done.seconds, 1e-9))
    written = f"{count(done.files, 'file')}, {size_text(done.bytes)} in {done.seconds:.1f} s ({rate}/s)"
    click.echo(clean(f"wrote {done.path}: {count(done.tensors, 'tensor')} by {done.method}, {written}"))
    click.echo(clean(f'open it with: AutoModelForCausalLM.from_pretrained("{done.path}")'))
