"""`holdfast verify`: read every byte, check every digest, name the tensors that damage touches."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from holdfast.cli.render import clean, open_path, print_json, progress, size_text
from holdfast.core.errors import Damaged

if TYPE_CHECKING:
    from holdfast.persist.checkpoint import Checkpoint


@click.command("verify", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, as_json: bool) -> None:
    """Read every byte of the checkpoint at PATH and check every digest.

    Exit code 0 when all is good, 1 when something is damaged. All damage is found, not only
    the first, with the tensors it touches.
    """
    checkpoint: Checkpoint = open_path(path)
    if not checkpoint.manifest.writer:
        raise Damaged(f"{checkpoint.path} was not written by Holdfast: it has no digests to verify")
    with progress("verifying", checkpoint.manifest.total_bytes) as advance:
        report = checkpoint.verify(advance)
    if as_json:
        print_json({"path": checkpoint.path, "good": report.good, "files": report.files, "bytes": report.bytes}
                   | {"damage": [asdict(damage) for damage in report.damage]})  # fmt: skip
    else:
        for damage in report.damage:
            where = "" if damage.offset is None else f" at {damage.offset} ({damage.size} bytes)"
            click.echo(f"DAMAGED {clean(damage.file)}{where}: {clean(damage.problem)}")
            for key in damage.keys:
                click.echo(f"  touches {clean(key)}")
        verdict = "good" if report.good else f"{len(report.damage)} damaged places"
        click.echo(f"{clean(checkpoint.path)}: {report.files} files, {size_text(report.bytes)}: {verdict}")
    raise click.exceptions.Exit(0 if report.good else 1)
