"""`holdfast ls`: list the checkpoints under a root with tags and branch notes, from their manifests only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from holdfast.checkpoint.catalog import Catalog, Committed, committed_steps, is_left, left_steps
from holdfast.checkpoint.tags import tagged
from holdfast.cli.render import clean, count, open_root, print_json, print_table, size_text
from holdfast.core.names import TRAINER_BEST, set_aside_kind
from holdfast.storage import Storage, is_checkpoint, shared_storage_at
from holdfast.storage.base import SharedStorage

_METRICS = 6  # columns; --json has all


@click.command("ls", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(root: str, as_json: bool) -> None:
    """List the checkpoints under ROOT, oldest first.

    The column "tensors" names the entries of the state that have tensors; `holdfast show` lists
    them all. Metrics that were saved with a step have a column each; tags are in the notes. Steps that were
    set aside come last. Only manifests are read. A step with a damaged manifest is listed with the
    reason. Of a Megatron run, the iterations are listed. Use `holdfast verify` to check the tensors.

    \b
    holdfast ls runs/llama
    holdfast ls s3://bucket/runs/llama --json
    """
    storage = open_root(root)
    catalog = Catalog(storage)
    catalog.scan()
    steps, aside = catalog.steps, catalog.set_aside
    notes = _notes(storage, steps, aside)
    if not steps and not aside and _list_iterations(storage, as_json=as_json):
        return
    if as_json:
        print_json([_fields(entry, notes) for entry in (*steps, *aside)])
        return
    if not steps and not aside:
        click.echo(f"no checkpoints under {clean(root)}{_hint(root, storage)}")
        return
    names = dict.fromkeys(name for entry in (*steps, *aside) for name in _metrics(entry))
    found = [name for name in names if name != TRAINER_BEST]  # a note
    metrics = sorted(found, key=_is_timing)[:_METRICS]
    headers = ["step", "size", "written", "by", "tensors", *metrics, *(["notes"] if notes else [])]
    rows = [_row(entry, notes, metrics) for entry in (*steps, *aside)]
    print_table(headers, rows, right=(0, 1, *range(5, 5 + len(metrics))))
    if len(found) > len(metrics):
        click.echo(f"{count(len(found) - len(metrics), 'more metric')}: --json shows all")


def _list_iterations(storage: SharedStorage, *, as_json: bool) -> bool:
    """List the iterations of a Megatron run. Returns False for another folder."""
    from holdfast.cli.megatron_iterations import iterations_of, print_iterations  # imports the readers of formats

    iterations = iterations_of(storage)
    if iterations and as_json:
        print_json(iterations)
    elif iterations:
        print_iterations(iterations)
    return bool(iterations)


def _hint(root: str, storage: Storage) -> str:
    """Suggest another path: the root may be a checkpoint, or its subfolders may contain checkpoints."""
    if is_checkpoint(storage):
        return "; it is itself a checkpoint: use holdfast show"
    if "://" in root:
        return ""
    subfolders = (child for child in sorted(Path(root).expanduser().iterdir()) if child.is_dir())
    roots = [child for child in subfolders if committed_steps(shared_storage_at(child))]
    return f"; found checkpoints under {', '.join(clean(str(child)) for child in roots)}" if roots else ""


def _notes(storage: Storage, steps: list[Committed], aside: list[Committed]) -> dict[str, list[str]]:
    """Return notes by folder: the tags of a step, and why it is not on the living branch."""
    problems: list[str] = []
    tags = tagged(storage, [*steps, *aside], problems)
    for problem in problems:
        click.echo(clean(problem), err=True)
    notes = {folder: [f"tag {name}" for name in names] for folder, names in tags.items()}
    left = left_steps(steps)
    for entry in steps:
        if is_left(entry, left):
            notes.setdefault(entry.folder, []).append("left behind")
    if best := _best_of_trainer(steps):
        notes.setdefault(best, []).append("best")
    for entry in aside:
        notes.setdefault(entry.folder, []).append(str(set_aside_kind(entry.folder)))
    return notes


def _best_of_trainer(steps: list[Committed]) -> str:
    """Return the folder of the step that Trainer called the best, "" if it called none so."""
    best = [entry for entry in steps if _metrics(entry).get(TRAINER_BEST) == entry.step]
    return max(best, key=lambda entry: entry.step).folder if best else ""


def _is_timing(metric: str) -> bool:
    return metric.endswith(("runtime", "_per_second", "_seconds"))


def _metrics(entry: Committed) -> dict[str, float]:
    """Return the metrics of a step that have a value."""
    metrics = {} if entry.manifest is None else entry.manifest.metrics
    return {name: value for name, value in metrics.items() if value is not None}


def _row(entry: Committed, notes: Mapping[str, list[str]], metrics: list[str]) -> list[str]:
    manifest = entry.manifest
    found = _metrics(entry)
    cells = [f"{found[name]:.6g}" if name in found else "" for name in metrics]
    cells += [", ".join(notes.get(entry.folder, ()))] if notes else []
    if manifest is None:
        return [str(entry.step), "", "", "", f"{entry.problem_label}: {entry.problem}", *cells]
    world = manifest.writer.get("world", 0)
    ranks = count(world, "rank") if isinstance(world, int) else str(world)
    groups = ", ".join(manifest.groups)
    return [str(entry.step), size_text(manifest.total_bytes), manifest.created, ranks, groups, *cells]


def _fields(entry: Committed, notes: Mapping[str, list[str]]) -> dict[str, object]:
    manifest = entry.manifest
    folder_notes = notes.get(entry.folder, [])
    if manifest is None:
        problem = {"good": False, "problem": str(entry.problem), "notes": folder_notes}
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
        "notes": folder_notes,
    }
