"""The runs whose steps are in memory: the ones looked at last, within a number of steps; short facts of all others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.storage.local import LocalStorage
from holdfast.web.run_records import RunRecords
from holdfast.web.run_view import FlightWatch, run_summary, unknown_summary
from holdfast.web.served_runs import ServedRoots, ServedRun

_MOST_RUNS = 64
_MOST_STEPS = 20_000  # of all runs in memory together, about 50 MB
_PATIENCE_S = 2.0  # of a list with runs in slow storages
_SUMMARY_S = 60.0  # how old the facts of a run may be that nobody looks at


class KnownRuns:
    """Runs by id. Thread-safe."""

    def __init__(self, roots: ServedRoots) -> None:
        self._roots = roots
        self._lock = threading.Lock()
        self._records: OrderedDict[str, RunRecords] = OrderedDict()
        self._flights: OrderedDict[str, FlightWatch] = OrderedDict()
        self._asking: dict[str, threading.Thread] = {}
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
        """Return the facts of every run for the list; those of runs that are not in memory may be a minute old.

        Other storages than this machine's are asked all at once, and waited for together for a moment: one that
        answers slowly, or not at all, is in the list with what is known of it.
        """
        runs = self._roots.list()
        remote = [self._ask(run) for run in runs if not isinstance(run.storage, LocalStorage) and self._is_old(run)]
        for run in runs:
            if isinstance(run.storage, LocalStorage) and self._is_old(run):
                self._summarize(run)
        until = time.monotonic() + _PATIENCE_S
        for thread in remote:
            thread.join(max(0.0, until - time.monotonic()))
        return [self._summaries[run.id][1] if run.id in self._summaries else unknown_summary(run) for run in runs]

    def _is_old(self, run: ServedRun) -> bool:
        at, _ = self._summaries.get(run.id, (-_SUMMARY_S, {}))
        with self._lock:
            return run.id in self._records or time.monotonic() - at > _SUMMARY_S

    def _summarize(self, run: ServedRun) -> None:
        self._summaries[run.id] = time.monotonic(), run_summary(self.records(run.id))

    def _try(self, run: ServedRun) -> None:
        with contextlib.suppress(HoldfastError, OSError):  # the list has what was known before
            self._summarize(run)

    def _ask(self, run: ServedRun) -> threading.Thread:
        """Return the thread that summarizes a run, started if there is none."""
        with self._lock:
            thread = self._asking.get(run.id)
            if thread is None or not thread.is_alive():
                thread = threading.Thread(target=self._try, args=(run,), name="holdfast-page-list", daemon=True)
                self._asking[run.id] = thread
                thread.start()
        return thread

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
