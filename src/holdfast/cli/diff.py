"""`holdfast diff`: compare keys, shapes, dtypes and values of two checkpoints, tensors and state.json."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict

import click

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.differences import Difference, compare_groups, compare_state
from holdfast.cli.render import clean, count, open_path, print_json
from holdfast.cli.steps import CheckpointPath, two_steps_option
from holdfast.core.errors import NotFound
from holdfast.core.terminal import progress_bar
from holdfast.program.program_differences import ProgramDifference, compare_programs


@click.command("diff", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("first", type=CheckpointPath())
@click.argument("second", type=CheckpointPath())
@two_steps_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--group", "chosen", multiple=True, help="Compare this group only; may be given more than once.")
def command(first: str, second: str, as_json: bool, chosen: tuple[str, ...]) -> None:
    """Compare the checkpoints FIRST and SECOND, regardless of the meshes that wrote them.

    FIRST and SECOND may be roots, Megatron's too. --step N is for both, --step N --step M for one
    each. Exit code 0 if the contents are equal, 1 if they differ. Files with equal recorded digests
    are not read. Use `holdfast verify` to check their bytes. Programs are compared by structure:
    which operators changed, in which module.

    \b
    holdfast diff runs/a/step-40 runs/a/step-50     two steps of a run
    holdfast diff runs/a runs/b --step 40           the same step of two runs
    holdfast diff run run --step 500 --step 1000    two iterations of a Megatron run
    holdfast diff runs/a runs/b --group model       the newest steps, only the model
    """
    one, two = open_path(first), open_path(second)
    groups = list(dict.fromkeys([*one.groups, *two.groups]))
    unknown = [name for name in chosen if name not in groups]
    if unknown:
        raise NotFound(f"neither checkpoint has a group {unknown[0]!r}; the groups are {', '.join(groups)}")
    with progress_bar("comparing", one.manifest.total_bytes) as advance:
        differences = [*compare_groups(one, two, chosen or groups, advance)]
        if not chosen:
            differences += compare_state(one, two)
    programs = [] if chosen else [*_compare_programs(one, two)]
    if as_json:
        listed = [asdict(difference) for difference in differences]
        fields = {"first": one.path, "second": two.path, "same": not differences and not programs}
        changed = {"program": [asdict(change) for change in programs]} if programs else {}
        print_json({**fields, "differences": listed, **changed})
    else:
        click.echo(clean(f"first:  {one.path}\nsecond: {two.path}", keep="\n"))
        if _is_same_folder(one.path, two.path):
            click.echo("note: both are the same folder")
        for difference in differences:
            click.echo(_format(difference))
        for change in programs:
            click.echo(clean(f"program: {change.where or '(the model itself)'}: {change.what}: {_change(change)}"))
        total = len(differences) + len(programs)
        click.echo("the same" if not total else count(total, "difference"))
    raise click.exceptions.Exit(1 if differences or programs else 0)


def _compare_programs(one: Checkpoint, two: Checkpoint) -> Iterator[ProgramDifference]:
    """Compare the programs of two checkpoints, if both have one; else report the one that is missing."""
    first, second = one.program, two.program
    if first is not None and second is not None:
        yield from compare_programs(first, second)
    elif first is not None or second is not None:
        yield ProgramDifference(
            "program", "only in one", "" if first is None else "here", "" if second is None else "here"
        )


def _change(change: ProgramDifference) -> str:
    return f"{change.first or 'missing'} against {change.second or 'missing'}"


def _is_same_folder(first: str, second: str) -> bool:
    return first == second or ("://" not in first + second and os.path.realpath(first) == os.path.realpath(second))


def _format(difference: Difference) -> str:
    text = f"{difference.group}: {difference.key}: {difference.what}"
    if difference.first is not None:
        text += f": {difference.first} against {difference.second}"
    if difference.elements is not None:
        text += f": {count(difference.elements, 'element')}"
        if difference.max_abs is not None:
            text += f", max |difference| {difference.max_abs:.6g}, mean {difference.mean_abs:.6g}"
    return clean(text)
