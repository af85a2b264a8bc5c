"""Progress of a load: the caller's function or a bar on the terminal of rank 0, and an event every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.events import Event, Listener
from holdfast.core.terminal import Progress, progress_bar

_EVENT_S = 5.0


@contextmanager
def watched(
    progress: Progress | None, listener: Listener, label: str, step: int | None, rank: int, total: int
) -> Iterator[Progress]:
    """Yield the function that counts the bytes of this rank, of `total`. It is called by one thread at a time."""
    read, due = 0, time.monotonic() + _EVENT_S

    with progress_bar(label, total if progress is None and rank == 0 else 0) as bar:

        def count(size: int) -> None:
            nonlocal read, due
            (progress or bar)(size)
            read += size
            if time.monotonic() >= due:
                due = time.monotonic() + _EVENT_S
                listener(Event("reading", step, rank, read, detail=f"{read / max(1, total):.0%} of this rank's bytes"))

        yield count
