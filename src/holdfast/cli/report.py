"""`holdfast report`: the page about a run as one HTML file, for a mail or an issue."""

from __future__ import annotations

import os
from pathlib import Path

import click

from holdfast.cli.render import clean, size_text
from holdfast.core.errors import StorageError


@click.command("report", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("roots", nargs=-1, required=True, metavar="ROOT [ROOT ...]")
@click.option("-o", "--output", default="report.html", show_default=True, help="The file to write.")
def command(roots: tuple[str, ...], output: str) -> None:
    """Write a report about the runs and checkpoints under each ROOT: one HTML file with its pictures.

    ROOT is what `holdfast serve` takes. The file has the timeline of steps, the curves, the
    retention preview, the newest steps with their trees of tensors, and what the newest step
    changed. It needs no server and no network, and contains no tensors; it does contain paths,
    the config of a training run, and state.json's values.

    \b
    holdfast report runs/llama                       write report.html
    holdfast report runs/llama -o llama.html
    """
    from holdfast.web.report_page import report_page

    page = report_page(list(roots))
    path = Path(output).expanduser()
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        hidden.write_bytes(page)
        hidden.replace(path)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise StorageError(f"cannot write {output}: {error.strerror or error}; choose another file with -o") from None
    click.echo(f"{clean(path)}  {size_text(len(page))}")
