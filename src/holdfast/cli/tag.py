"""`holdfast tag`: tag a step so that retention keeps it, list tags with the folders they protect, delete a tag."""

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
@click.option("--step", type=int, help="The step to tag; default: the newest.")
@click.option("--delete", is_flag=True, help="Delete the tag.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(root: str, name: str | None, step: int | None, delete: bool, as_json: bool) -> None:
    """Tag a step under ROOT with NAME, or list the tags.

    \b
    holdfast tag runs/llama                          list the tags
    holdfast tag runs/llama released --step 12000    keep this step regardless of the policy
    holdfast tag runs/llama released --delete        delete the tag

    Neither retention nor `holdfast gc` deletes a tagged step.
    """
    storage = open_run(root)
    if name is None and (delete or step is not None):
        raise click.UsageError("missing NAME: --step and --delete need the name of a tag")
    if delete and step is not None:
        raise click.UsageError("--delete cannot be combined with --step: it deletes the tag from any step")
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
        print_json({name: asdict(tag) for name, tag in tags.items()})
        return
    if name in before and name in tags and before[name] != tags[name]:
        click.echo(f"{name} was on step {before[name].step}")
    if tags:
        print_table(["tag", "step", "folder"], _rows(storage), right=(1,))
    else:
        click.echo(f"no tags under {clean(root)}")


def _rows(storage: Storage) -> list[list[str]]:
    """Return each tag with its step and the folder it protects, which a rewind may have renamed."""
    folders = {
        name: folder
        for folder, names in tagged(storage, [*committed_steps(storage), *set_aside_folders(storage)], []).items()
        for name in names
    }
    return [[name, str(tag.step), folders.get(name, "missing")] for name, tag in read_tags(storage, []).items()]


def _find(storage: Storage, step: int | None) -> Committed:
    matches = [entry for entry in living_steps(storage) if step in (None, entry.step)]
    if step is None:
        matches = [entry for entry in matches if entry.manifest is not None]
    if not matches:
        raise NotFound(f"{storage.name} has no " + ("checkpoint" if step is None else f"checkpoint of step {step}"))
    return matches[-1]
