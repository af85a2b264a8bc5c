"""`holdfast tag`: give a step a name, so that retention never removes it."""

from __future__ import annotations

from dataclasses import asdict

import click

from holdfast.cli.render import clean, print_json, print_table
from holdfast.core.errors import NotFound
from holdfast.persist.catalog import Committed, living_steps
from holdfast.persist.tags import add_tag, read_tags, remove_tag
from holdfast.storage import storage_at
from holdfast.storage.base import SharedStorage, Storage


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
    storage = storage_at(root)
    if not isinstance(storage, SharedStorage) or not storage.exists():
        raise NotFound(f"{root}: there is no such root")
    if name is None and (delete or step is not None):
        raise click.UsageError("name the tag")
    if name is not None and delete:
        remove_tag(storage, name)
    elif name is not None:
        add_tag(storage, name, _find(storage, step))
    tags = read_tags(storage)
    if as_json:
        print_json({tag: asdict(found) for tag, found in tags.items()})
    elif not tags:
        click.echo(f"no tags under {clean(root)}")
    else:
        print_table(["tag", "step"], [[tag, str(found.step)] for tag, found in tags.items()], right=(1,))


def _find(storage: Storage, step: int | None) -> Committed:
    found = [entry for entry in living_steps(storage) if step in (None, entry.step)]
    if step is None:
        found = [entry for entry in found if entry.manifest is not None]
    if not found:
        raise NotFound(f"{storage.name} has no " + ("checkpoint" if step is None else f"checkpoint of step {step}"))
    return found[-1]
