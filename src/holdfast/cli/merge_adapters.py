"""`holdfast merge --lora`: the options that merges of adapters have, progress and the printed result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.render import clean, count, print_json, size_text, written_text
from holdfast.convert.torchrun_ranks import launched_rank, launched_ranks
from holdfast.core.errors import InvalidArgument, Mismatch, StorageError, Unsupported
from holdfast.core.terminal import progress_bar

if TYPE_CHECKING:
    from holdfast.merging.lora.merge_adapters import LoraForecast, LoraOptions

_SHARED = frozenset(
    {"models", "destination", "adapters", "base", "weights", "max_shard_size", "dry_run", "force", "no_verify"}
)
_SHARED_FLAGS = frozenset({"as_json"})


def merge_adapters(
    context: click.Context,
    models: Sequence[str],
    destination: str,
    adapters: Sequence[str],
    *,
    base: str | None,
    weights: Sequence[str],
    max_shard_size: str,
    verify: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Merge adapters into the only model, or into the base that they name; or print what that would write."""
    from holdfast.merging.lora.merge_adapters import LoraOptions, MergedAdapters, run_lora_merge

    _refuse_others(context)
    bases = [*models, *([base] if base is not None else [])]
    if len(bases) > 1:
        raise InvalidArgument(f"--lora merges adapters into one base, got {', '.join(bases)}")
    options = LoraOptions(
        adapters=tuple(adapters),
        weights=tuple(map(_number, weights)) or (1.0,) * len(adapters),
        base=bases[0] if bases else None,
        max_shard_size=max_shard_size,
        verify=verify,
        force=force,
    )
    if dry_run:
        if launched_rank()[0] == 0:
            _dry_run(options, destination, as_json=as_json)
        return
    with launched_ranks() as ranks:

        def show_progress(total: int) -> Any:
            return progress_bar("merging", total // ranks.world if ranks.rank == 0 else 0)

        done: MergedAdapters = run_lora_merge(options, destination, ranks, show_progress)
    if ranks.rank == 0:
        _print_result(done, as_json=as_json)


def _refuse_others(context: click.Context) -> None:
    """Raise InvalidArgument for an option that a merge of adapters does not have."""
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and name == "steps":
            raise InvalidArgument(
                "--steps: name each step with --lora, such as --lora runs/lora/step-900, and give each a --weight of "
                "1/n for the average of the models that they make"
            )
        if given and name not in _SHARED | _SHARED_FLAGS:
            raise InvalidArgument(f"{parameter.opts[0]} has no effect on a merge of adapters (--lora); leave it out")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"--weight {text}: expected a number for each adapter") from None


def _dry_run(options: LoraOptions, destination: str, *, as_json: bool) -> None:
    from holdfast.convert.destination import DestinationFolder
    from holdfast.merging.lora.merge_adapters import PreparedLoraMerge

    problems: list[str] = []
    found: LoraForecast | None = None
    try:
        DestinationFolder.at(destination).check_free(force=options.force)
    except (InvalidArgument, StorageError) as error:
        problems.append(str(error))
    try:
        found = PreparedLoraMerge(options).forecast()
    except (Mismatch, Unsupported) as error:
        problems.append(str(error))
    if as_json:
        print_json({**({} if found is None else asdict(found)), "problems": problems})
    else:
        if found is not None:
            _print_forecast(found)
        for problem in problems:
            click.echo(clean(f"would fail: {problem}", keep="\n"))
    raise click.exceptions.Exit(1 if problems else 0)


def _print_forecast(found: LoraForecast) -> None:
    click.echo(clean(f"{', '.join(found.adapters)} into {found.base}"))
    click.echo(
        f"would change {len(found.changed)} of {count(found.tensors, 'tensor')} and write "
        f"{count(found.files, 'tensor file')}, {size_text(found.bytes)}"
    )
    for note in found.notes:
        click.echo(clean(f"note: {note}"))


def _print_result(done: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    for note in done.notes:
        click.echo(clean(f"note: {note}"))
    changed = f"{len(done.changed)} of {count(done.tensors, 'tensor')} changed by {count(done.adapters, 'adapter')}"
    click.echo(clean(f"wrote {done.path}: {changed}, {written_text(done)}"))
    click.echo(clean(f'open it with: AutoModelForCausalLM.from_pretrained("{done.path}")'))
