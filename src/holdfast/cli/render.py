"""Shared by commands: format sizes, tables, JSON, escaped text; open the root or path of an argument."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from holdfast.core.errors import NotFound
from holdfast.core.terminal import size_text

if TYPE_CHECKING:
    from holdfast.storage.base import SharedStorage

__all__ = [
    "clean",
    "count",
    "is_file",
    "live",
    "open_path",
    "open_root",
    "open_run",
    "print_json",
    "print_table",
    "size_text",
    "with_deadline",
    "written_text",
]
_DEADLINE_S = 20


class Written(Protocol):
    """The output of a command: its files, their bytes, and the seconds that it took."""

    @property
    def files(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...


def count(number: int, noun: str) -> str:
    """Format a number with its noun: "1 file", "3 files"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def written_text(done: Written) -> str:
    """Format the output of a command: "2 files, 1.20 GB in 3.0 s (400.00 MB/s)"."""
    rate = size_text(done.bytes / max(done.seconds, 1e-9))
    return f"{count(done.files, 'file')}, {size_text(done.bytes)} in {done.seconds:.1f} s ({rate}/s)"


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def clean(text: object, keep: str = "") -> str:
    """Escape control characters in text from a checkpoint, so that the terminal does not interpret them."""
    return "".join(c if c.isprintable() or c in keep else f"\\x{ord(c):02x}" for c in str(text))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print an aligned table, with the columns in `right` right-aligned."""
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(header), *(len(row[i]) for row in cells), 0) for i, header in enumerate(headers)]
    for row in [list(headers), *cells]:
        parts = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        click.echo("  ".join(parts).rstrip())


def live(text: Callable[[], str], interval_s: float) -> None:
    """Show a changing text in place until Ctrl-C."""
    import time

    from rich.live import Live
    from rich.text import Text

    try:
        with Live(Text(text()), auto_refresh=False) as screen:
            while True:
                time.sleep(interval_s)
                screen.update(Text(text()), refresh=True)
    except KeyboardInterrupt:
        return


def open_root(root: str) -> SharedStorage:
    """Open the storage of a root, a path or an address. Raises NotFound if it does not exist."""
    from holdfast.cli.steps import with_full_step_name
    from holdfast.storage import shared_storage_at

    storage = shared_storage_at(with_deadline(with_full_step_name(root)))
    if not storage.exists():
        raise NotFound(f"{root} is a file; give a folder" if is_file(root) else f"{root}: no such folder")
    return storage


def open_run(root: str) -> SharedStorage:
    """Open the storage of a run's root. Raises NotFound if it does not exist or is a checkpoint."""
    from holdfast.storage import is_checkpoint

    storage = open_root(root)
    if is_checkpoint(storage):
        raise NotFound(f"{root} is a checkpoint; give the root that contains it")
    return storage


def with_deadline(path: str) -> str:
    """Add a short deadline to an address without one, because the user is waiting."""
    if "://" not in path or "deadline_s=" in path:
        return path
    return f"{path}{'&' if '?' in path else '?'}deadline_s={_DEADLINE_S}"


def is_file(path: str) -> bool:
    """Return True if a path is a single local file."""
    return "://" not in path and Path(path).expanduser().is_file()


def open_path(path: str) -> Any:
    """Open the checkpoint or file at a path or address, or the newest readable step if it is a root."""
    from holdfast.sources import open_source

    return open_source(with_deadline(path), lambda text: click.echo(clean(f"holdfast: {text}"), err=True))
