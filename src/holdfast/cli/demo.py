"""`holdfast demo`: the whole story on this machine, in a few minutes, with what it shows."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli.render import print_json

if TYPE_CHECKING:
    from holdfast.demo.story import Finding


@click.command("demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", default="out/demo", show_default=True, help="A folder of the demo's own: it is emptied first.")
@click.option("--json", "as_json", is_flag=True, help="Print what was shown as JSON, and nothing else.")
def command(out: str, as_json: bool) -> None:
    """Train a small mixture of experts, kill it, resume it elsewhere, and look at what is left.

    Four ranks train under FSDP2 x expert parallelism, with an average of the weights and saves
    that training does not wait for. One rank is killed -9 in the middle of a save. The run goes
    on under tensor x pipeline parallelism; its loss is laid over that of a run which was never
    interrupted; transformers opens the result and writes with it. OUT/demo.png shows it all.

    Takes a few minutes on two cores. Needs torch, and transformers for the last part.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from holdfast.demo.story import Story

    began = time.monotonic()
    folder = Path(out)
    findings = Story(folder, _silent if as_json else click.echo).run()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings, folder, time.monotonic() - began)
    sys.exit(0 if all(finding.good for finding in findings) else 1)


def _silent(text: str) -> None:
    """Nobody listens: what is shown comes at the end."""


def _print(findings: list[Finding], folder: Path, seconds: float) -> None:
    click.echo(f"\nShown in {seconds:.0f} s:")
    for finding in findings:
        click.echo(f"  {'ok    ' if finding.good else 'FAILED'} {finding.text}")
    click.echo(f"  see {folder / 'demo.png'}")
