"""metrics.jsonl read as it grows: a column per number, thinned so that memory is bounded, and marks of saves and kills.

The file is read from where the last read ended. A step that comes again after a restart replaces the one before,
with all later ones: the picture then shows what the run went on with.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.limits import MIB
from holdfast.format import strictjson
from holdfast.storage.local_files import LocalReader

_NAMES = 64
_POINTS = 50_000  # of a column; then it is thinned by half
_MARKS = 20_000
_CHUNK_BYTES = 4 * MIB
_ONE_READ_BYTES = 16 * MIB  # a second of work; the next look reads on
_LINE_BYTES = 256 * 1024
_TEXT = 300  # characters of a mark
_NOT_FINITE = re.compile(rb"(:\s*)-?(?:NaN|Infinity)\b")  # which other programs write; Holdfast writes null
_NOT_METRICS = frozenset({"step", "event", "at"})
_KINDS = {"began": "start", "took weights": "start", "save": "save", "resumed": "restore"}
_LOGGED = frozenset({"failed", "skipped", "evaluated", "published"})


@dataclass(slots=True)
class MetricColumn:
    """The values of one metric in the order of steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        """Add a value; a step that is not after the last one replaces it and all after it."""
        if self.steps and step <= self.steps[-1]:
            self.cut(step)
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > _POINTS:
            self.steps, self.values = thin(self.steps, self.values, _POINTS // 2)

    def cut(self, step: int) -> None:
        """Remove the values from a step on."""
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:]

    def fields(self, points: int) -> dict[str, list[Any]]:
        """Return at most so many points, with every minimum and maximum."""
        steps, values = thin(self.steps, self.values, points)
        return {"step": steps.tolist(), "value": values.tolist()}

    def after(self, step: int) -> dict[str, list[Any]]:
        """Return the points after a step."""
        at = bisect_left(self.steps, step + 1)
        return {"step": self.steps[at:].tolist(), "value": self.values[at:].tolist()}


def thin(steps: array[int], values: array[float], points: int) -> tuple[array[int], array[float]]:
    """Return at most `points` points: of each of several ranges the least and the largest value, and both ends."""
    count = len(steps)
    if count <= max(4, points):
        return steps, values
    kept = {0, count - 1}
    ranges = max(1, (points - 2) // 2)
    for number in range(ranges):
        begin, end = number * count // ranges, (number + 1) * count // ranges
        part = values[begin:end]
        kept.add(begin + part.index(min(part)))
        kept.add(begin + part.index(max(part)))
    chosen = sorted(kept)
    return array("q", [steps[at] for at in chosen]), array("d", [values[at] for at in chosen])


@dataclass(frozen=True, slots=True)
class RunMark:
    """An event of a run at a step, for the picture and the log."""

    step: int
    kind: str
    text: str
    at: float | None = None

    def fields(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"step": self.step, "kind": self.kind, "text": self.text, "at": self.at}


class MetricsFile:
    """One run's metrics. `stalls` are the milliseconds that training waited for each save, by step."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._clear()

    def _clear(self) -> None:
        self._position = 0
        self._rest = b""
        self._identity: object = None
        self._last_step: int | None = None
        self._odd: set[str] = set()  # metrics whose last value was not finite
        self.columns: dict[str, MetricColumn] = {}
        self.marks: list[RunMark] = []
        self._dropped = 0  # marks that are too old to keep
        self.stalls: dict[int, float] = {}
        self.generation = 0  # changes when earlier points were replaced

    def read(self) -> None:
        """Read what was appended since the last call, a part of it if that is much. A replaced file is read again."""
        if self._path is None:
            return
        try:
            file = LocalReader(self._path)
        except HoldfastError:
            return
        try:
            if file.size < self._position:
                generation = self.generation
                self._clear()
                self.generation = generation + 1
            until = min(file.size, self._position + _ONE_READ_BYTES)
            while self._position < until:
                size = min(_CHUNK_BYTES, until - self._position)
                buffer = bytearray(size)
                file.read_into(self._position, [memoryview(buffer)])
                self._position += size
                self._take(bytes(buffer))
        except HoldfastError:
            return  # cut while it was read: the next call finds out
        finally:
            file.close()

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= _LINE_BYTES else b""
        for line in lines:
            if line and len(line) <= _LINE_BYTES:
                self._line(line)

    def _line(self, line: bytes) -> None:
        try:
            record = strictjson.loads(line, "metrics.jsonl")
        except HoldfastError:
            finite = _NOT_FINITE.sub(rb"\1null", line)
            if finite != line:
                self._line(finite)
            return  # or the process was killed during this write
        if not isinstance(record, dict):
            return
        step = record.get("step")
        if not (step is None or (type(step) is int and 0 <= step < 2**53)):
            return
        if "event" in record:
            self._event(record, step)
        elif step is not None:
            self._numbers(record, step)

    def _numbers(self, record: Mapping[str, Any], step: int) -> None:
        if self._last_step is not None and step <= self._last_step:
            for column in self.columns.values():
                column.cut(step)
            self.generation += 1
        self._last_step = step
        for name, value in record.items():
            if name not in _NOT_METRICS and type(value) in (int, float) and abs(value) < 1e300:
                if name not in self.columns and len(self.columns) >= _NAMES:
                    continue
                self.columns.setdefault(name[:_TEXT], MetricColumn()).append(step, float(value))
                self._odd.discard(name)
            elif value is None and name in self.columns and name not in self._odd:
                self._odd.add(name)
                self._mark(RunMark(step, "not finite", f"{name} is not a finite number from this step on"))

    def _event(self, record: Mapping[str, Any], step: int | None) -> None:
        name, at = record["event"], record.get("at")
        if not isinstance(name, str):
            return
        step = self._last_step or 0 if step is None else step
        time = float(at) if isinstance(at, int | float) and abs(at) < 1e300 else None
        if name == "save" and type(record.get("stall_ms")) in (int, float):
            self.stalls[step] = float(record["stall_ms"])
        if name == "resumed" and self._last_step is not None and self._last_step > step:
            lost = self._last_step - step
            self._mark(RunMark(self._last_step, "kill", f"stopped; {lost} steps after step {step} are repeated", time))
        if name in _KINDS or name in _LOGGED:
            self._mark(RunMark(step, _KINDS.get(name, name), _event_text(name, record), time))

    def _mark(self, mark: RunMark) -> None:
        self.marks.append(mark)
        if len(self.marks) > _MARKS:
            del self.marks[: _MARKS // 2]
            self._dropped += _MARKS // 2

    @property
    def marks_seen(self) -> int:
        """The number of marks so far, with those that were dropped."""
        return self._dropped + len(self.marks)

    def marks_after(self, seen: int) -> list[RunMark]:
        """Return the marks that came after a number of them."""
        return self.marks[max(0, seen - self._dropped) :]

    def fields(self, names: list[str], points: int) -> dict[str, Any]:
        """Return the answer for some metrics, or for all without names."""
        chosen = [name for name in names or self.columns if name in self.columns]
        return {
            "names": {name: self.columns[name].fields(points) for name in chosen},
            "all_names": list(self.columns),
            "marks": [mark.fields() for mark in self.marks if mark.kind not in ("published", "evaluated")],
        }


def _event_text(name: str, record: Mapping[str, Any]) -> str:
    values = (f"{key} {value}" for key, value in record.items() if key not in _NOT_METRICS and value not in ("", None))
    return ", ".join([name, *values])[:_TEXT]
