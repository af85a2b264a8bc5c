"""`holdfast demo`: run the story of demo/story.py on this machine, and print its findings."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from holdfast.cli.render import print_json
from holdfast.core.torch_needed import require_torch

if TYPE_CHECKING:
    from holdfast.demo.story import Finding


@click.command("demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", default="out/demo", show_default=True, help="Output folder; existing contents are deleted.")
@click.option("--json", "as_json", is_flag=True, help="Print only the findings, as JSON.")
def command(out: str, as_json: bool) -> None:
    """Train a small mixture of experts, kill it, resume it on another layout, and check the result.

    Four ranks train with FSDP2 and expert parallelism, an average of the weights, and background
    saves. One rank is killed with SIGKILL during a save. The run resumes with tensor and pipeline
    parallelism. Its loss is compared with an uninterrupted run, and transformers generates text
    with the result. OUT/demo.png shows the curves.

    Takes a few minutes on two cores. Requires torch, and transformers for the last part.

    \b
    holdfast demo
    holdfast demo --out /tmp/demo
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    require_torch("holdfast demo", extra="transformers")
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
    """Print nothing; with --json only the findings are printed."""


def _print(findings: list[Finding], folder: Path, seconds: float) -> None:
    click.echo(f"\nFindings after {seconds:.0f} s:")
    for finding in findings:
        click.echo(f"  {'ok    ' if finding.good else 'FAILED'} {finding.text}")
    click.echo(f"  see {folder / 'demo.png'}")
