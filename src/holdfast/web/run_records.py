"""The steps of one run as rows: state, size, times, branch, tags, why it is damaged; kept up to date cheaply."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

from holdfast.checkpoint.catalog import Catalog, Committed, is_left, left_steps
from holdfast.checkpoint.lineage import LeftStep
from holdfast.checkpoint.retention import saved_policy
from holdfast.checkpoint.tags import tagged
from holdfast.core.errors import HoldfastError, NotFound, Untrusted
from holdfast.core.names import folder_step, set_aside_kind
from holdfast.storage.local import LocalStorage
from holdfast.web.metric_columns import MetricColumn, MetricsFile
from holdfast.web.served_runs import ServedRoots, ServedRun

_LOCAL_S, _REMOTE_S = 0.4, 3.0  # between looks at a storage
_FULL_S = 30.0  # between comparisons of every folder
_METRICS = 64
_MOST_GONE = 1000


@dataclass(frozen=True, slots=True)
class StepRow:
    """One folder of a step as the page shows it."""

    folder: str
    step: int
    state: str  # committed, damaged, untrusted, left_behind, abandoned
    created: str | None
    bytes: int | None
    seconds: float | None
    stall_ms: float | None
    parent: int | None
    branch: int
    tags: tuple[str, ...]
    world: int | None
    note: str | None
    verified: bool | None
    verified_at: str | None
    metrics: Mapping[str, float | None]

    def fields(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


_COLUMNS = [column.name for column in fields(StepRow) if column.name != "metrics"]


class RunRecords:
    """The records of one run. Thread-safe."""

    def __init__(self, run: ServedRun, roots: ServedRoots) -> None:
        self.run = run
        self._roots = roots
        self.lock = threading.RLock()
        self._catalog = Catalog(run.storage)
        self._looked = self._compared = -math.inf
        self._outside: set[str] = set()
        self._rows: dict[str, StepRow] = {}
        self._shown: object = None
        self._verified: dict[tuple[str, str], tuple[bool, str]] = {}  # outcome and time, by folder and attempt
        self.gone: dict[str, dict[str, Any]] = {}  # steps that were deleted since the server began to look
        self.problem: str | None = None
        self.metrics = MetricsFile(run.folder / "metrics.jsonl" if run.folder is not None else None)

    @property
    def rows(self) -> dict[str, StepRow]:
        """Every step by folder, in the order of steps."""
        return self._rows

    @property
    def entries(self) -> list[Committed]:
        """The steps with their own names, as the catalog has them, oldest first."""
        return self._catalog.steps

    @property
    def set_aside(self) -> list[Committed]:
        """The folders that were set aside."""
        return self._catalog.set_aside

    def entry(self, folder: str) -> Committed:
        """Return a step's entry; raises NotFound, or Untrusted for a folder outside of the roots."""
        entry = self._catalog.get(folder)
        if entry is None:
            raise NotFound(self._missing(folder))
        if folder in self._outside:
            raise Untrusted(f"{folder} is a link that leads outside of the roots of this page")
        return entry

    def _missing(self, folder: str) -> str:
        if folder in self.gone:
            gone = self.gone[folder]
            return f"step {gone['step']} was {gone['why']} (seen at {gone['at']})"
        step, newest = folder_step(folder), max((row.step for row in self._rows.values()), default=None)
        if step is not None and newest is not None and step < newest:
            return f"{self.run.name} has no step {step}: it was {self._why_gone()}, or never saved"
        return f"{self.run.name} has no step in a folder {folder[:80]!r}"

    def note_verified(self, folder: str, attempt: str, *, is_good: bool) -> None:
        """Remember what a verification has found."""
        with self.lock:
            self._verified[folder, attempt] = is_good, _now()
            self._update_rows()

    def refresh(self, *, force: bool = False) -> None:
        """Look at the storage again, unless that was a moment ago."""
        with self.lock:
            now = time.monotonic()
            pause = _LOCAL_S if isinstance(self.run.storage, LocalStorage) else _REMOTE_S
            if now - self._looked < pause and not force:
                return
            try:
                self._look(now)
                self.problem = None
            except (HoldfastError, OSError) as error:
                self.problem = str(error)
            self.metrics.read()
            self._looked = time.monotonic()
            self._update_rows()

    def _look(self, now: float) -> None:
        if self.run.kind == "checkpoint" or not self.run.storage.exists():
            return
        if now - self._compared > _FULL_S or not len(self._catalog):
            self._catalog.scan()
            self._compared = now
        else:
            self._catalog.check(self._recent())
        for folder in self._catalog.changed:
            self._outside.discard(folder)
            if not self._roots.is_inside(self.run.storage, folder):
                self._outside.add(folder)

    def _recent(self) -> set[str]:
        """Return the folders whose manifests are compared at every look: the newest, where changes happen."""
        return {entry.folder for entry in self._catalog.steps[-16:]}

    def _update_rows(self) -> None:
        problems: list[str] = []
        steps, aside = self._catalog.steps, self._catalog.set_aside
        try:
            tags = tagged(self.run.storage, [*steps, *aside], problems) if steps or aside else {}
        except (HoldfastError, OSError) as error:
            tags, problems = {}, [str(error)]
        shown = (tags, len(self.metrics.stalls), self.metrics.generation, dict(self._verified))
        if problems:
            self.problem = problems[0]
        if shown == self._shown and not self._catalog.changed:
            return
        self._shown = shown
        self._catalog.changed.clear()
        left = left_steps(steps)
        branches = _branches([*steps, *aside])
        made = [self._row(entry, left, branches, tags.get(entry.folder, ())) for entry in (*steps, *aside)]
        before, self._rows = self._rows, {row.folder: row for row in sorted(made, key=lambda r: (r.step, r.folder))}
        for folder in before.keys() - self._rows.keys():
            self.gone[folder] = {"folder": folder, "step": before[folder].step, "at": _now(), "why": self._why_gone()}
        for folder in list(self.gone)[:-_MOST_GONE]:
            del self.gone[folder]

    def _why_gone(self) -> str:
        """Say why a step may have been deleted: the run's policy, if it has one."""
        try:
            policy = saved_policy(self.run.storage)
        except (HoldfastError, OSError):
            policy = None
        return "deleted" if policy is None else f"deleted: {policy} did not keep it"

    def _row(
        self, entry: Committed, left: set[LeftStep], branches: Mapping[LeftStep, int], tags: Iterable[str]
    ) -> StepRow:
        manifest = None if entry.folder in self._outside else entry.manifest
        state, note = _state(entry, is_left(entry, left), is_outside=entry.folder in self._outside)
        if manifest is None:
            return StepRow(
                entry.folder,
                entry.step,
                state,
                None,
                None,
                None,
                None,
                None,
                0,
                tuple(tags),
                None,
                note,
                None,
                None,
                {},
            )
        world = manifest.writer.get("world")
        verified, verified_at = self._verified.get((entry.folder, manifest.attempt), (None, None))
        return StepRow(
            folder=entry.folder,
            step=entry.step,
            state=state,
            created=manifest.created[:40],
            bytes=manifest.total_bytes,
            seconds=number(manifest.writer.get("seconds")),
            stall_ms=self.metrics.stalls.get(entry.step, number(manifest.writer.get("stall_ms"))),
            parent=manifest.parent,
            branch=branches.get((entry.step, manifest.attempt), 0),
            tags=tuple(tags),
            world=world if type(world) is int else None,
            note=note,
            verified=verified,
            verified_at=verified_at,
            metrics=dict(list(manifest.metrics.items())[:_METRICS]),
        )

    def columns(self) -> dict[str, list[Any]]:
        """Return every row, by column."""
        rows = list(self._rows.values())
        return {name: [getattr(row, name) for row in rows] for name in _COLUMNS}

    def metric_values(self) -> dict[str, list[float | None]]:
        """Return the metrics that were saved with the steps, by name, a value per row."""
        names = dict.fromkeys(name for row in self._rows.values() for name in row.metrics)
        return {name: [row.metrics.get(name) for row in self._rows.values()] for name in list(names)[:_METRICS]}

    def saved_metrics(self) -> dict[str, MetricColumn]:
        """Return the metrics of the living steps as curves, for runs without a file of metrics."""
        curves: dict[str, MetricColumn] = {}
        for row in self._rows.values():
            for name, value in row.metrics.items() if row.state == "committed" else ():
                if value is not None and len(curves) <= _METRICS:
                    curves.setdefault(name, MetricColumn()).append(row.step, float(value))
        return curves


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def number(value: Any) -> float | None:
    """Return a finite number of a field that nobody has checked, else None."""
    return float(value) if type(value) in (int, float) and -1e300 < value < 1e300 else None


def _state(entry: Committed, has_left: bool, *, is_outside: bool) -> tuple[str, str | None]:
    aside = set_aside_kind(entry.folder)
    if is_outside:
        return "untrusted", "a link that leads outside of the roots of this page"
    if entry.problem is not None:
        return ("untrusted" if isinstance(entry.problem, Untrusted) else "damaged"), str(entry.problem)[:2000]
    if aside == "damaged":
        return "damaged", "set aside: a restore found it damaged"
    if aside == "abandoned":
        return "abandoned", "set aside: a restore went back to an earlier step"
    if has_left:
        return "left_behind", "a restore went back to an earlier step, or skipped this one"
    return "committed", None


def _branches(entries: Iterable[Committed]) -> dict[LeftStep, int]:
    """Number the branches that were left behind, by the step that left each; the living one is 0."""
    found: dict[LeftStep, int] = {}
    number = 0
    for entry in sorted(entries, key=lambda entry: (entry.manifest.created if entry.manifest else "", entry.step)):
        manifest = entry.manifest
        fresh = [left for left in manifest.abandons if left not in found] if manifest is not None else []
        if fresh:
            number += 1
            found |= dict.fromkeys(fresh, number)
    return found
