"""What a run measured, as JSON lines that survive a kill: one per step, one per event."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from holdfast.core.errors import StorageError


class Metrics:
    """Appends lines to a run's file, from any thread; with no path it keeps nothing.

    A run that is killed may leave half a line, and steps that its successor makes again: the
    file is only ever added to, and `read_metrics` takes the last word on every step.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: TextIO | None = None

    def step(self, step: int, **values: float) -> None:
        """One optimizer step's numbers."""
        self._write({"step": step, **values})

    def event(self, name: str, step: int | None = None, **values: Any) -> None:
        """Something that happened: a save, a resume, an evaluation."""
        self._write({"event": name, "step": step, "at": time.time(), **values})

    def _write(self, record: dict[str, Any]) -> None:
        with self._lock:
            if self._path is None:
                return
            if self._file is None:
                self._file = _open_at_a_line(self._path)
            self._file.write(json.dumps({key: finite_or_none(value) for key, value in record.items()}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """No more is written from here on."""
        with self._lock:
            self._path = None
            if self._file is not None:
                self._file.close()
                self._file = None


def finite_or_none(value: Any) -> Any:
    """JSON has no word for a number that is not finite: it becomes null, as it does in a manifest."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_at_a_line(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: metrics cannot be written there: {error}") from None
    if torn:
        file.write("\n")
    return file


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Steps in order, each as it was last made, and events in the order they happened."""
    steps: dict[int, dict[str, Any]] = {}
    events = []
    for record in _records(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        if "event" in record:
            events.append(record)
        elif isinstance(record.get("step"), int):
            steps[record["step"]] = record
    return [steps[step] for step in sorted(steps)], events


def _records(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the process was killed, or the power went, while it wrote this line
            continue
        if isinstance(record, dict):
            yield record
