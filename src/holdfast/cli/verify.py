"""`holdfast verify`: run the verification of a checkpoint or of all steps of a root, and print the damage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from holdfast.checkpoint.catalog import Committed, committed_steps
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.cli.render import clean, count, is_file, open_path, print_json, size_text
from holdfast.cli.steps import CheckpointPath, step_option
from holdfast.cli.tensor_tree import folded_keys
from holdfast.core.errors import NotFound, Untrusted
from holdfast.core.names import MANIFEST, natural_key
from holdfast.core.terminal import progress_bar
from holdfast.sources.foreign import missing_digests
from holdfast.storage import Storage, is_checkpoint, storage_at


@click.command("verify", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=CheckpointPath())
@step_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, as_json: bool) -> None:
    """Read every byte of the checkpoint at PATH and check every digest.

    If PATH is a root, all its steps are verified. Only Holdfast's own format has digests: folders of
    Hugging Face, torch and others, also those that convert writes, do not. Exit code 0 if everything is good, 1 if
    anything is damaged. All damage is reported, with the affected tensors.

    \b
    holdfast verify runs/llama              all steps
    holdfast verify runs/llama --step 40    step 40 only; also runs/llama/step-40
    """
    root = storage_at(path)
    steps = [] if is_file(path) or is_checkpoint(root) else committed_steps(root)
    reports = [_verify_step(entry, root) for entry in steps] if steps else [_verify(open_path(path))]
    if as_json:
        print_json(reports[0] if len(reports) == 1 and not steps else reports)
    else:
        for report in reports:
            _print(report)
    raise click.exceptions.Exit(0 if all(report["good"] for report in reports) else 1)


def _verify_step(entry: Committed, root: Storage) -> dict[str, Any]:
    if isinstance(entry.problem, Untrusted):  # its bytes may still be good
        click.echo(clean(f"holdfast: NOT TRUSTED: {entry.problem}"), err=True)
    elif entry.manifest is None:
        problem: dict[str, Any] = {
            "file": MANIFEST,
            "problem": str(entry.problem),
            "offset": None,
            "size": None,
            "keys": [],
        }
        return {"path": f"{root.name}/{entry.folder}", "good": False, "files": 0, "bytes": 0, "damage": [problem]}
    return _verify(Checkpoint(root, entry.folder))


def _verify(checkpoint: Checkpoint) -> dict[str, Any]:
    if not checkpoint.manifest.writer:
        raise NotFound(missing_digests(checkpoint))
    with progress_bar("verifying", checkpoint.manifest.total_bytes) as advance:
        report = checkpoint.verify(advance)
    facts = {"path": checkpoint.path, "good": report.good, "files": report.files, "bytes": report.bytes}
    if report.unchecked:
        facts["unchecked"] = list(report.unchecked)
    return facts | {"damage": [asdict(damage) for damage in report.damage]}


def _print(report: dict[str, Any]) -> None:
    for damage in report["damage"]:
        where = "" if damage["offset"] is None else f" at {damage['offset']} ({damage['size']} bytes)"
        click.echo(clean(f"DAMAGED {damage['file']}{where}: {damage['problem']}"))
        for key in folded_keys(sorted(damage["keys"], key=natural_key)):
            click.echo(clean(f"  affects {key}"))
    verdict = "good" if report["good"] else f"damaged in {count(len(report['damage']), 'place')}"
    click.echo(clean(f"{report['path']}: {count(report['files'], 'file')}, {size_text(report['bytes'])}: {verdict}"))
    for text in report.get("unchecked", ()):
        click.echo(clean(f"  not checked: {text}; a load compares it"))
