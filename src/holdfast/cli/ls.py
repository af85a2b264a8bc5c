"""`holdfast ls`: the checkpoints under a root, from their manifests alone."""

from __future__ import annotations

import click

from holdfast.cli.render import clean, count, open_root, print_json, print_table, size_text
from holdfast.persist.catalog import Committed, committed_steps
from holdfast.storage import is_checkpoint


@click.command("ls", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(root: str, as_json: bool) -> None:
    """List the checkpoints under ROOT, oldest first.

    Reads manifests only. A step whose manifest is damaged is listed with the reason; whether
    the tensors are good is what `holdfast verify` tells.
    """
    storage = open_root(root)
    found = committed_steps(storage)
    if as_json:
        print_json([_fields(entry) for entry in found])
        return
    if not found:
        hint = "; it is a checkpoint itself: see holdfast show" if is_checkpoint(storage) else ""
        click.echo(f"no checkpoints under {clean(root)}{hint}")
        return
    print_table(["step", "size", "written", "by", "groups"], [_row(entry) for entry in found], right=(0, 1))


def _row(entry: Committed) -> list[str]:
    manifest = entry.manifest
    if manifest is None:
        return [str(entry.step), "", "", "", f"DAMAGED: {entry.problem}"]
    world = manifest.writer.get("world", 0)
    ranks = count(world, "rank") if isinstance(world, int) else str(world)
    groups = ", ".join(manifest.groups)
    return [str(entry.step), size_text(manifest.total_bytes), manifest.created, ranks, groups]


def _fields(entry: Committed) -> dict[str, object]:
    manifest = entry.manifest
    if manifest is None:
        return {"step": entry.step, "folder": entry.folder, "good": False, "problem": str(entry.problem)}
    return {
        "step": entry.step,
        "folder": entry.folder,
        "good": True,
        "bytes": manifest.total_bytes,
        "created": manifest.created,
        "parent": manifest.parent,
        "groups": list(manifest.groups),
        "writer": dict(manifest.writer),
    }
