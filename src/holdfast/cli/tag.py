"""`holdfast tag`: give a step a name, so that retention never removes it."""

from __future__ import annotations

from dataclasses import asdict

import click

from holdfast.checkpoint.catalog import Committed, committed_steps, living_steps, set_aside_folders
from holdfast.checkpoint.tags import add_tag, read_tags, remove_tag, tagged
from holdfast.cli.render import clean, open_run, print_json, print_table
from holdfast.core.errors import NotFound
from holdfast.storage.base import Storage


@click.command("tag", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root")
@click.argument("name", required=False)
@click.option("--step", type=int, help="The step to tag; the newest if not given.")
@click.option("--delete", is_flag=True, help="Take the tag away.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(root: str, name: str | None, step: int | None, delete: bool, as_json: bool) -> None:
    """Tag a step under ROOT with NAME, or list the tags.

    \b
    holdfast tag runs/llama                          which tags there are
    holdfast tag runs/llama released --step 12000    keep this step, whatever the policy
    holdfast tag runs/llama released --delete        let it go with the others

    A tagged step is never removed by retention or `holdfast gc`.
    """
    storage = open_run(root)
    if name is None and (delete or step is not None):
        raise click.UsageError("name the tag")
    if delete and step is not None:
        raise click.UsageError("--delete takes a tag away, whatever step it is on: leave --step out")
    problems: list[str] = []
    before = read_tags(storage, [])
    if name is not None and delete:
        remove_tag(storage, name)
    elif name is not None:
        add_tag(storage, name, _find(storage, step))
    tags = read_tags(storage, problems)
    for problem in problems:
        click.echo(clean(problem), err=True)
    if as_json:
        print_json({tag: asdict(found) for tag, found in tags.items()})
        return
    if name in before and name in tags and before[name] != tags[name]:
        click.echo(f"{name} was on step {before[name].step}")
    if tags:
        print_table(["tag", "step", "folder"], _rows(storage), right=(1,))
    else:
        click.echo(f"no tags under {clean(root)}")


def _rows(storage: Storage) -> list[list[str]]:
    """Each tag with its step and the folder it protects, which is another one once a rewind set it aside."""
    folders = {
        name: folder
        for folder, names in tagged(storage, [*committed_steps(storage), *set_aside_folders(storage)], []).items()
        for name in names
    }
    return [[name, str(tag.step), folders.get(name, "gone")] for name, tag in read_tags(storage, []).items()]


def _find(storage: Storage, step: int | None) -> Committed:
    found = [entry for entry in living_steps(storage) if step in (None, entry.step)]
    if step is None:
        found = [entry for entry in found if entry.manifest is not None]
    if not found:
        raise NotFound(f"{storage.name} has no " + ("checkpoint" if step is None else f"checkpoint of step {step}"))
    return found[-1]
