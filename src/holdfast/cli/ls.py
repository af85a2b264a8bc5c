"""`holdfast ls`: the checkpoints under a root, from their manifests alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from holdfast.checkpoint.catalog import Catalog, Committed, committed_steps, is_left, left_steps
from holdfast.checkpoint.tags import tagged
from holdfast.cli.render import clean, count, open_root, print_json, print_table, size_text
from holdfast.format.names import set_aside_kind
from holdfast.storage import Storage, is_checkpoint, shared_storage_at


@click.command("ls", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(root: str, as_json: bool) -> None:
    """List the checkpoints under ROOT, oldest first.

    Steps that were set aside come last. Reads manifests only. A step whose manifest is damaged
    is listed with the reason; whether the tensors are good is what `holdfast verify` tells.
    """
    storage = open_root(root)
    catalog = Catalog(storage)
    catalog.scan()
    found, aside = catalog.steps, catalog.set_aside
    notes = _notes(storage, found, aside)
    if as_json:
        print_json([_fields(entry, notes) for entry in (*found, *aside)])
        return
    if not found and not aside:
        click.echo(f"no checkpoints under {clean(root)}{_hint(root, storage)}")
        return
    headers = ["step", "size", "written", "by", "groups", *(["notes"] if notes else [])]
    print_table(headers, [_row(entry, notes) for entry in (*found, *aside)], right=(0, 1))


def _hint(root: str, storage: Storage) -> str:
    """Where else to look: the root may be a checkpoint, or the folder of a run, which has them one folder down."""
    if is_checkpoint(storage):
        return "; it is a checkpoint itself: see holdfast show"
    if "://" in root:
        return ""
    below = (child for child in sorted(Path(root).expanduser().iterdir()) if child.is_dir())
    found = [child for child in below if committed_steps(shared_storage_at(child))]
    return f"; there are some under {', '.join(clean(str(child)) for child in found)}" if found else ""


def _notes(storage: Storage, found: list[Committed], aside: list[Committed]) -> dict[str, list[str]]:
    """What there is to say of a folder beside its manifest: its tags, and why it is not of the living branch."""
    problems: list[str] = []
    tags = tagged(storage, [*found, *aside], problems)
    for problem in problems:
        click.echo(clean(problem), err=True)
    notes = {folder: [f"tag {name}" for name in names] for folder, names in tags.items()}
    left = left_steps(found)
    for entry in found:
        if is_left(entry, left):
            notes.setdefault(entry.folder, []).append("left behind")
    for entry in aside:
        notes.setdefault(entry.folder, []).append(str(set_aside_kind(entry.folder)))
    return notes


def _row(entry: Committed, notes: Mapping[str, list[str]]) -> list[str]:
    manifest = entry.manifest
    said = [", ".join(notes.get(entry.folder, ()))] if notes else []
    if manifest is None:
        return [str(entry.step), "", "", "", f"{entry.problem_label}: {entry.problem}", *said]
    world = manifest.writer.get("world", 0)
    ranks = count(world, "rank") if isinstance(world, int) else str(world)
    groups = ", ".join(manifest.groups)
    return [str(entry.step), size_text(manifest.total_bytes), manifest.created, ranks, groups, *said]


def _fields(entry: Committed, notes: Mapping[str, list[str]]) -> dict[str, object]:
    manifest = entry.manifest
    said = notes.get(entry.folder, [])
    if manifest is None:
        problem = {"good": False, "problem": str(entry.problem), "notes": said}
        return {"step": entry.step, "folder": entry.folder, **problem}
    return {
        "step": entry.step,
        "folder": entry.folder,
        "good": True,
        "bytes": manifest.total_bytes,
        "created": manifest.created,
        "parent": manifest.parent,
        "groups": list(manifest.groups),
        "writer": dict(manifest.writer),
        "metrics": dict(manifest.metrics),
        "notes": said,
    }
