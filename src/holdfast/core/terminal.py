"""Progress over bytes or steps: a bar on the terminal, and none where nobody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

_SHOWN_BYTES = 100_000_000

Progress = Callable[[int], None]


def no_progress(count: int) -> None:
    """Ignore progress."""


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Progress]:
    """Show a progress bar over bytes if stderr is a terminal. Yields the function that advances it."""
    if total < _SHOWN_BYTES or not sys.stderr.isatty():
        yield no_progress
        return
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _bar(label, total, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as advance:
        yield advance


@contextmanager
def step_bar(label: str, total: int) -> Iterator[Progress]:
    """Show a progress bar over steps if stderr is a terminal. Yields the function that advances it."""
    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    with _bar(label, total, MofNCompleteColumn(), TimeElapsedColumn()) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int, *columns: ProgressColumn) -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console

    ahead = (progress.TextColumn("{task.description}"), progress.BarColumn())
    bar = progress.Progress(*ahead, *columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=total)
    with contextlib.suppress(OSError, ValueError):
        bar.start()
    try:
        yield lambda count: bar.advance(task, count)
    finally:
        # Other ranks may wait for this one: a terminal that is gone must not fail its work.
        with contextlib.suppress(OSError, ValueError):
            bar.stop()


def size_text(size: float) -> str:
    """Format a number of bytes in decimal units, like transformers does."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    raise AssertionError
