"""`holdfast verify`: read every byte, check every digest, name the tensors that damage touches."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from holdfast.checkpoint.catalog import Committed, committed_steps
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.cli.render import clean, count, is_file, open_path, print_json, progress, size_text
from holdfast.core.errors import NotFound, Untrusted
from holdfast.format.names import MANIFEST
from holdfast.storage import Storage, is_checkpoint, storage_at


@click.command("verify", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, as_json: bool) -> None:
    """Read every byte of the checkpoint at PATH and check every digest.

    PATH may be a root: then all its steps are verified. Exit code 0 when all is good, 1 when
    something is damaged. All damage is found, not only the first, with the tensors it touches.
    """
    root = storage_at(path)
    found = [] if is_file(path) or is_checkpoint(root) else committed_steps(root)
    answers = [_answer_of(entry, root) for entry in found] if found else [_verify(open_path(path))]
    if as_json:
        print_json(answers[0] if len(answers) == 1 and not found else answers)
    else:
        for answer in answers:
            _print(answer)
    raise click.exceptions.Exit(0 if all(answer["good"] for answer in answers) else 1)


def _answer_of(entry: Committed, root: Storage) -> dict[str, Any]:
    if isinstance(entry.problem, Untrusted):  # its bytes may be good all the same
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
        raise NotFound(f"{checkpoint.path} was not written by Holdfast: it has no digests to verify")
    with progress("verifying", checkpoint.manifest.total_bytes) as advance:
        report = checkpoint.verify(advance)
    facts = {"path": checkpoint.path, "good": report.good, "files": report.files, "bytes": report.bytes}
    return facts | {"damage": [asdict(damage) for damage in report.damage]}


def _print(answer: dict[str, Any]) -> None:
    for damage in answer["damage"]:
        where = "" if damage["offset"] is None else f" at {damage['offset']} ({damage['size']} bytes)"
        click.echo(clean(f"DAMAGED {damage['file']}{where}: {damage['problem']}"))
        for key in damage["keys"]:
            click.echo(clean(f"  touches {key}"))
    verdict = "good" if answer["good"] else f"damaged in {count(len(answer['damage']), 'place')}"
    click.echo(clean(f"{answer['path']}: {count(answer['files'], 'file')}, {size_text(answer['bytes'])}: {verdict}"))
