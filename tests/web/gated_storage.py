"""A storage that answers only while its gate is open, as one over a bad network does."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.storage.local import LocalStorage
from holdfast.web.run_records import RunRecords
from holdfast.web.served_runs import ServedRoots, ServedRun

DEADLINE_S = 60.0


class GatedStorage:
    """A local storage behind a gate. `waiting` is set once a call waits."""

    def __init__(self, root: Path) -> None:
        self._storage = LocalStorage(root)
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(DEADLINE_S), "the gate stayed closed"
        return function(*arguments, **options)

    def close(self) -> None:
        self.waiting.clear()
        self.gate.clear()


class GatedRoots(ServedRoots):
    """Roots of which the runs with some names are behind a gate."""

    def __init__(self, folder: Path, *names: str) -> None:
        super().__init__([str(folder)])
        self._gated = {name: GatedStorage(folder / name) for name in names}

    def storage(self, name: str) -> GatedStorage:
        return self._gated[name]

    def list(self) -> list[ServedRun]:
        runs = [
            replace(run, storage=self._gated[run.name]) if run.name in self._gated else run for run in super().list()
        ]
        self._found = {run.id: run for run in runs}
        return runs


def gated_records(folder: Path, name: str) -> tuple[RunRecords, GatedStorage]:
    """Return the records of a run behind a gate that is open."""
    roots = GatedRoots(folder, name)
    run = next(run for run in roots.list() if run.name == name)
    return RunRecords(run, roots), roots.storage(name)
