"""Events of one run for one open page: changed steps, saves in flight, new points of metrics, the log.

Events are made when the client has read the ones before, so a client that never reads costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.web.json_text import to_json
from holdfast.web.page_workers import PageWorkers
from holdfast.web.run_records import RunRecords, StepRow
from holdfast.web.run_view import retention_fields

_PAUSE_S = 1.0
_QUIET_S = 15.0
_MOST_ROWS = 500  # changed at once; beyond that the page fetches the run again
_POINTS = 2000
_MARKS = 200


def event(name: str, value: Any) -> bytes:
    """Encode one event."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(value) + b"\n\n"


class RunFollower:
    """One page's view of a run: the state that it was told, and what is new since then."""

    def __init__(self, records: RunRecords, flights: Callable[[], list[dict[str, Any]]]) -> None:
        self._records = records
        self._flights = flights
        with records.lock:
            self._rows: dict[str, StepRow] = records.rows
            self._generation = records.metrics.generation
            self._last = self._last_steps()
            self._marks = records.metrics.marks_seen
        self._in_flight: list[dict[str, Any]] = []
        self._problem = records.problem

    def poll(self) -> list[bytes]:
        """Look at the run again and return what is new."""
        self._records.refresh()
        flights = self._flights()
        retention = retention_fields(self._records) if self._records.rows is not self._rows else None
        with self._records.lock:
            return [*self._problems(), *self._steps(retention), *self._flight_events(flights), *self._metrics()]

    def _problems(self) -> list[bytes]:
        if self._records.problem == self._problem:
            return []
        self._problem = self._records.problem
        return [event("problem", {"problem": self._problem})]

    def _steps(self, retention: dict[str, Any] | None) -> list[bytes]:
        """Return the changes of steps; `retention` was read without the lock, and is None if there was none."""
        rows = self._records.rows
        if rows is self._rows or retention is None:
            return []
        before, self._rows = self._rows, rows
        changed = [row for folder, row in rows.items() if before.get(folder) != row]
        removed = [folder for folder in before if folder not in rows]
        if not changed and not removed:
            return []
        if len(changed) + len(removed) > _MOST_ROWS:
            return [event("reload", {"why": "many steps changed"})]
        steps = {"steps": [row.fields() for row in changed]}
        gone = [self._records.gone[folder] for folder in removed if folder in self._records.gone]
        fields = {"changed": steps, "removed": removed, "retention": retention, "gone": gone}
        return [event("run", fields), *self._step_log(before, changed, gone), *self._saved_metrics(before, changed)]

    def _step_log(
        self, before: Mapping[str, StepRow], changed: Sequence[StepRow], gone: Sequence[Mapping[str, Any]]
    ) -> Iterator[bytes]:
        """Yield lines of the log about steps; a training run's own file has those about its saves."""
        at = time.time()
        for row in changed[-_MARKS:]:
            old = before.get(row.folder)
            if old is None and not self._records.metrics.marks_seen:
                seconds = "" if row.seconds is None else f" in {row.seconds:.2f} s"
                yield event("log", {"at": at, "step": row.step, "kind": "published", "text": f"saved{seconds}"})
            elif old is not None and old.state != row.state:
                yield event("log", {"at": at, "step": row.step, "kind": row.state, "text": row.note or row.state})
        for one in gone[-_MARKS:]:
            yield event("log", {"at": at, "step": one["step"], "kind": "removed", "text": one["why"]})

    def _saved_metrics(self, before: Mapping[str, StepRow], changed: Sequence[StepRow]) -> Iterator[bytes]:
        """Yield the metrics saved with new steps, if the run has no file of metrics."""
        if self._records.metrics.columns:
            return
        names: dict[str, dict[str, list[Any]]] = {}
        for row in sorted(changed, key=lambda row: row.step):
            for name, value in row.metrics.items() if row.folder not in before and row.state == "committed" else ():
                if value is not None:
                    points = names.setdefault(name, {"step": [], "value": []})
                    points["step"].append(row.step)
                    points["value"].append(value)
        if names:
            yield event("metrics", {"names": names})

    def _flight_events(self, flights: list[dict[str, Any]]) -> list[bytes]:
        if not flights and not self._in_flight:
            return []
        self._in_flight = flights
        return [event("flights", {"flights": flights})]

    def _metrics(self) -> list[bytes]:
        metrics = self._records.metrics
        events = []
        fresh = metrics.marks_after(self._marks)[-_MARKS:]
        self._marks = metrics.marks_seen
        events += [event("log", mark.fields()) for mark in fresh]
        if metrics.generation != self._generation:
            self._generation, self._last = metrics.generation, self._last_steps()
            return [*events, event("reload", {"why": "the run went back to an earlier step"})]
        new = {}
        for name, column in metrics.columns.items():
            points = column.after(self._last.get(name, -1))
            if points["step"]:
                new[name] = points
        if any(len(points["step"]) > _POINTS for points in new.values()):
            self._last = self._last_steps()
            return [*events, event("reload", {"why": "many new points"})]
        if new:
            self._last = self._last_steps()
            events.append(event("metrics", {"names": new}))
        return events

    def _last_steps(self) -> dict[str, int]:
        return {name: column.steps[-1] for name, column in self._records.metrics.columns.items() if column.steps}


async def run_events(make: Callable[[], RunFollower], workers: PageWorkers) -> AsyncIterator[bytes]:
    """Yield the events of a run for ever."""
    yield b"retry: 2000\n\n"
    try:
        follower = await workers.run(make)
    except HoldfastError as error:
        yield event("reload", {"why": str(error)})
        return
    told = time.monotonic()
    while True:
        for one in await workers.run(follower.poll):
            told = time.monotonic()
            yield one
        if time.monotonic() - told > _QUIET_S:
            told = time.monotonic()
            yield b": nothing new\n\n"
        await asyncio.sleep(_PAUSE_S)
