"""metrics.jsonl of a run: append lines that survive a kill, one per step or event, and read them back."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from holdfast.core.errors import StorageError

METRICS = "metrics.jsonl"  # in the folder of a run


class Metrics:
    """Appends lines to a run's file, from any thread; without a path it writes nothing.

    A killed run may leave a partial line, and steps that the resumed run repeats. The file is only ever
    appended to, and `read_metrics` uses the last record of every step.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: TextIO | None = None

    def step(self, step: int, **values: float) -> None:
        """Write the numbers of one optimizer step."""
        self._write({"step": step, **values})

    def event(self, name: str, step: int | None = None, **values: Any) -> None:
        """Write an event, such as a save, a resume or an evaluation."""
        self._write({"event": name, "step": step, "at": time.time(), **values})

    def _write(self, record: dict[str, Any]) -> None:
        with self._lock:
            if self._path is None:
                return
            if self._file is None:
                self._file = _open_for_append(self._path)
            self._file.write(json.dumps({key: finite_or_none(value) for key, value in record.items()}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; later records are dropped."""
        with self._lock:
            self._path = None
            if self._file is not None:
                self._file.close()
                self._file = None


def finite_or_none(value: Any) -> Any:
    """Replace a float that is not finite by None: JSON has no such numbers, and manifests use null as well."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_for_append(path: Path) -> TextIO:
    """Open the file at the start of a line, terminating a partial last line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot write metrics: {error}") from None
    if torn:
        file.write("\n")
    return file


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the last record of each step, in step order, and the events in file order."""
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
        except ValueError:  # the process was killed, or power was lost, during this write
            continue
        if isinstance(record, dict):
            yield record
