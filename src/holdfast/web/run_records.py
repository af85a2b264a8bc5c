"""The steps of one run as rows: state, size, times, branch, tags, why it is damaged; kept up to date cheaply."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, cast

from holdfast.checkpoint.catalog import Catalog, Committed, is_left, left_steps
from holdfast.checkpoint.lineage import LeftStep
from holdfast.checkpoint.retention import saved_policy
from holdfast.checkpoint.tags import tagged
from holdfast.core.errors import HoldfastError, NotFound, Untrusted
from holdfast.core.names import folder_step, set_aside_kind
from holdfast.keep import Policy, StepProperties
from holdfast.storage.local import LocalStorage
from holdfast.web.metric_columns import MetricColumn, MetricsFile
from holdfast.web.served_runs import ServedRoots, ServedRun

_LOCAL_S, _REMOTE_S = 0.4, 3.0  # between looks at a storage
_FULL_S = 30.0  # between comparisons of every folder
_FIRST_S = 10.0  # that others wait for the first look at a storage
NO_ANSWER = "the storage has not answered yet; the page fills when it does"
_METRICS = 64
_MOST_GONE = 1000
_OUTSIDE = "by someone outside of Holdfast"


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
        self.lock = threading.RLock()  # of what is known; never held while a storage is waited for
        self._looking = threading.Lock()  # held by the thread that looks at the storage
        self._catalog = Catalog(run.storage)  # of that thread only
        self._looked = self._compared = -math.inf
        self._outside: set[str] = set()
        self.entries: list[Committed] = []  # the steps with their own names, oldest first
        self.set_aside: list[Committed] = []  # the folders that were set aside
        self._by_folder: dict[str, Committed] = {}
        self._tags: Mapping[str, Sequence[str]] = {}
        self._rows: dict[str, StepRow] = {}
        self._shown: object = None
        self._verified: dict[tuple[str, str], tuple[bool, str]] = {}  # outcome and time, by folder and attempt
        self.gone: dict[str, dict[str, Any]] = {}  # steps that were deleted since the server began to look
        self.problem: str | None = NO_ANSWER
        self.metrics = MetricsFile(run.folder / "metrics.jsonl" if run.folder is not None else None)

    @property
    def rows(self) -> dict[str, StepRow]:
        """Every step by folder, in the order of steps."""
        return self._rows

    def entry(self, folder: str) -> Committed:
        """Return a step's entry; raises NotFound, or Untrusted for a folder outside of the roots."""
        entry = self._by_folder.get(folder)
        if entry is None:
            raise NotFound(self._missing(folder))
        if folder in self._outside:
            raise Untrusted(f"{folder} is a link that leads outside of the roots of this page")
        return entry

    def _missing(self, folder: str) -> str:
        if folder in self.gone:
            gone = self.gone[folder]
            return f"step {gone['step']} is gone: {gone['why']} (seen at {gone['at']})"
        step, newest = folder_step(folder), max((row.step for row in self._rows.values()), default=None)
        if step is not None and newest is not None and step < newest:
            return f"{self.run.name} has no step {step}: {why_gone(self._policy(), step)}, or it was never saved"
        return f"{self.run.name} has no step in a folder {folder[:80]!r}"

    def note_verified(self, folder: str, attempt: str, *, is_good: bool) -> None:
        """Remember what a verification has found."""
        with self.lock:
            self._verified[folder, attempt] = is_good, _now()
            self._update_rows()

    def refresh(self, *, force: bool = False) -> None:
        """Look at the storage again, unless that was a moment ago.

        One thread looks. The others go on with what is known, so that a storage that answers slowly takes one of the
        server's threads and not all of them; before the first look has ended they wait for a while.
        """
        if not self._is_due(force=force):
            return
        patience = -1.0 if force else 0.0 if self._looked > -math.inf else _FIRST_S
        if not (self._looking.acquire(timeout=patience) if patience else self._looking.acquire(blocking=False)):
            return
        try:
            if self._is_due(force=force):
                self._look_again()
        finally:
            self._looking.release()

    def _is_due(self, *, force: bool) -> bool:
        pause = _LOCAL_S if isinstance(self.run.storage, LocalStorage) else _REMOTE_S
        return force or time.monotonic() - self._looked >= pause

    def _look_again(self) -> None:
        problem = None
        try:
            problem = self._look(time.monotonic())
        except (HoldfastError, OSError) as error:
            problem = str(error)
        steps, aside = self._catalog.steps, self._catalog.set_aside
        tags, problems = self._read_tags([*steps, *aside])
        by_folder = {entry.folder: entry for entry in (*steps, *aside)}
        policy = self._policy() if self._rows.keys() - by_folder.keys() else None
        with self.lock:
            self.metrics.read()
            self.problem = next(iter(problems), problem)
            is_new = bool(self._catalog.changed)
            self._catalog.changed.clear()
            self.entries, self.set_aside, self._by_folder, self._tags = steps, aside, by_folder, tags
            self._update_rows(policy, is_new=is_new)
            self._looked = time.monotonic()

    def _look(self, now: float) -> str | None:
        """Bring the catalog up to date; return what a person must know."""
        if self.run.kind == "checkpoint":
            return None
        if not self.run.storage.exists():
            return f"{self.run.address} is gone; the page shows what was there" if len(self._catalog) else None
        if now - self._compared > _FULL_S or not len(self._catalog):
            self._catalog.scan()
            self._compared = now
        else:
            self._catalog.check(self._recent())
        for folder in self._catalog.changed:
            self._outside.discard(folder)
            if not self._roots.is_inside(self.run.storage, folder):
                self._outside.add(folder)
        return None

    def _recent(self) -> set[str]:
        """Return the folders whose manifests are compared at every look: the newest, where changes happen."""
        return {entry.folder for entry in self._catalog.steps[-16:]}

    def _read_tags(self, entries: list[Committed]) -> tuple[Mapping[str, Sequence[str]], list[str]]:
        problems: list[str] = []
        try:
            return (tagged(self.run.storage, entries, problems) if entries else {}), problems
        except (HoldfastError, OSError) as error:
            return {}, [str(error)]

    def _update_rows(self, policy: Policy | None = None, *, is_new: bool = False) -> None:
        tags, steps, aside = self._tags, self.entries, self.set_aside
        shown = (tags, len(self.metrics.stalls), self.metrics.generation, dict(self._verified))
        if shown == self._shown and not is_new:
            return
        self._shown = shown
        left = left_steps(steps)
        branches = _branches([*steps, *aside])
        made = [self._row(entry, left, branches, tags.get(entry.folder, ())) for entry in (*steps, *aside)]
        before, self._rows = self._rows, {row.folder: row for row in sorted(made, key=lambda r: (r.step, r.folder))}
        for row in (row for folder, row in before.items() if folder not in self._rows):
            why = why_removed(policy, row, self._rows.values())
            self.gone[row.folder] = {"folder": row.folder, "step": row.step, "at": _now(), "why": why}
        for folder in list(self.gone)[:-_MOST_GONE]:
            del self.gone[folder]

    def _policy(self) -> Policy | None:
        """Return the run's policy, None without one that can be read."""
        try:
            return saved_policy(self.run.storage)
        except (HoldfastError, OSError):
            return None

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
        if verified is False and state == "committed":
            state, note = "damaged", "found damaged by a verification"
        return StepRow(
            folder=entry.folder,
            step=entry.step,
            state=state,
            created=manifest.created[:40],
            bytes=manifest.total_bytes,
            seconds=number(manifest.writer.get("seconds")),
            stall_ms=self.metrics.stalls.get(entry.step, number(manifest.writer.get("stall_ms"))),
            parent=manifest.parent,
            branch=branches.get((entry.step, manifest.identity), 0),
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


def why_removed(policy: Policy | None, row: StepRow, others: Iterable[StepRow]) -> str:
    """Say why a step went that was here a moment ago: by the policy, or by someone whom the policy does not know."""
    if set_aside_kind(row.folder) is not None:
        return "its folder was set aside, and was removed by hand"
    if row.tags:
        return f"removed {_OUTSIDE}: the tag {row.tags[0]} kept it"
    if policy is None:
        return f"removed {_OUTSIDE}: the run has no rules that delete steps"
    if row.created is None:
        return f"removed {_OUTSIDE}: no rule deletes a step whose manifest cannot be read"
    living = [one for one in others if one.state == "committed"]
    reasons = policy.kept(cast(list[StepProperties], [*living, row])).get(row.step, [])
    if reasons and living:
        return f"removed {_OUTSIDE}: {', '.join(reasons)} keeps it"
    return f"deleted: {policy} did not keep it"


def why_gone(policy: Policy | None, step: int) -> str:
    """Say what is known of a step that nobody saw go: rules of numbers tell, others cannot be asked any more."""
    if policy is None:
        return f"removed {_OUTSIDE}, or before events were kept"
    for name, arguments in policy.rules:
        if name == "every" and step % arguments[0] == 0:
            return f"removed {_OUTSIDE}, or by other rules before: every({arguments[0]}) keeps it"
    return f"deleted, as far as can be told: {policy} did not keep it"


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
