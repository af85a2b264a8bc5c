"""The runs whose steps are in memory: the ones looked at last, within a number of steps; short facts of all others."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any

from holdfast.web.run_records import RunRecords
from holdfast.web.run_view import FlightWatch, run_summary
from holdfast.web.served_runs import ServedRoots

_MOST_RUNS = 64
_MOST_STEPS = 20_000  # of all runs in memory together, about 50 MB
_SUMMARY_S = 60.0  # how old the facts of a run may be that nobody looks at


class KnownRuns:
    """Runs by id. Thread-safe."""

    def __init__(self, roots: ServedRoots) -> None:
        self._roots = roots
        self._lock = threading.Lock()
        self._records: OrderedDict[str, RunRecords] = OrderedDict()
        self._flights: OrderedDict[str, FlightWatch] = OrderedDict()
        self._summaries: dict[str, tuple[float, dict[str, Any]]] = {}

    def records(self, run_id: str) -> RunRecords:
        """Return an up-to-date run; raises NotFound."""
        run = self._roots.get(run_id)
        with self._lock:
            records = self._records.get(run_id)
            if records is None:
                records = self._records[run_id] = RunRecords(run, self._roots)
            self._records.move_to_end(run_id)
        records.refresh()
        with self._lock:
            self._shrink()
        return records

    def _shrink(self) -> None:
        """Forget the runs looked at longest ago; the last one stays, however many steps it has."""
        steps = sum(len(records.rows) for records in self._records.values())
        while len(self._records) > 1 and (len(self._records) > _MOST_RUNS or steps > _MOST_STEPS):
            _, gone = self._records.popitem(last=False)
            steps -= len(gone.rows)

    def summaries(self) -> list[dict[str, Any]]:
        """Return the facts of every run for the list; those of runs that are not in memory may be a minute old."""
        found = []
        for run in self._roots.list():
            at, summary = self._summaries.get(run.id, (-_SUMMARY_S, {}))
            with self._lock:
                is_known = run.id in self._records
            if is_known or time.monotonic() - at > _SUMMARY_S:
                summary = run_summary(self.records(run.id))
                self._summaries[run.id] = time.monotonic(), summary
            found.append(summary)
        return found

    def flights(self, run_id: str) -> list[dict[str, Any]]:
        """Return the saves in flight of a run."""
        run = self._roots.get(run_id)
        if run.kind == "checkpoint":
            return []
        with self._lock:
            watch = self._flights.setdefault(run_id, FlightWatch(run.storage))
            while len(self._flights) > _MOST_RUNS:
                self._flights.popitem(last=False)
        return watch.fields()
