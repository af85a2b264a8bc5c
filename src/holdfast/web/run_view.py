"""The answers about a run: its steps by column, its retention, its saves in flight, the list of runs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median_low
from typing import Any

from holdfast.checkpoint import retention
from holdfast.checkpoint.catalog import Committed, living
from holdfast.core.errors import HoldfastError
from holdfast.keep import Policy
from holdfast.storage.base import SharedStorage
from holdfast.storage.local_files import LocalReader
from holdfast.web.run_records import NO_ANSWER, RunRecords
from holdfast.web.served_runs import CONFIG, ServedRun
from holdfast.writer.in_flight import FlightRank, flight_ranks, saves_in_flight

_CONFIG_BYTES = 256 * 1024
_SILENT_S = 5.0
_RANKS = 4096


def run_summary(records: RunRecords) -> dict[str, Any]:
    """Return a run's line in the list of runs."""
    run, rows = records.run, list(records.rows.values())
    good = [row for row in rows if row.state == "committed"]
    newest = max(good, key=lambda row: row.step, default=None)
    return {
        "id": run.id,
        "name": run.name,
        "address": run.address,
        "kind": run.kind,
        "steps": len(rows),
        "newest": newest.step if newest else None,
        "newest_created": newest.created if newest else None,
        "bytes": sum(row.bytes or 0 for row in rows),
        "in_flight": run.kind != "checkpoint" and bool(_flights(run.storage)),
        "problem": records.problem,
    }


def unknown_summary(run: ServedRun) -> dict[str, Any]:
    """Return the line of a run whose storage has not answered yet."""
    facts = dict.fromkeys(("steps", "newest", "newest_created", "bytes"))
    known = {"id": run.id, "name": run.name, "address": run.address, "kind": run.kind, "in_flight": False}
    return {**known, **facts, "problem": NO_ANSWER}


def run_fields(records: RunRecords) -> dict[str, Any]:
    """Return everything about a run but its metrics."""
    run = records.run
    newest = next((entry.manifest for entry in reversed(records.entries) if entry.manifest is not None), None)
    return {
        "id": run.id,
        "name": run.name,
        "address": run.address,
        "kind": run.kind,
        "problem": records.problem,
        "steps": records.columns(),
        "metrics": records.metric_values(),
        "retention": retention_fields(records),
        "layout_axes": layout_axes(newest.writer if newest is not None else {}),
        "config": _config(records),
        "gone": list(records.gone.values()),
        "events": [mark.fields() for mark in records.metrics.marks[-200:]],
    }


def layout_axes(writer: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the mesh that wrote a step, None if it is not known."""
    mesh = writer.get("mesh")
    if not isinstance(mesh, Mapping) or not all(type(size) is int for size in mesh.values()):
        return None
    return dict(mesh)


def _config(records: RunRecords) -> str | None:
    """Return the config.toml of a training run."""
    if records.run.folder is None:
        return None
    try:
        file = LocalReader(records.run.folder / CONFIG)
    except HoldfastError:
        return None
    try:
        return file.read(_CONFIG_BYTES).decode(errors="replace")
    except HoldfastError:
        return None
    finally:
        file.close()


def retention_fields(records: RunRecords) -> dict[str, Any]:
    """Return what the run's policy keeps and why, what gc would delete now, and what the next save would."""
    if records.run.kind == "checkpoint":
        return _no_retention(None)
    found = records.entries
    try:
        policy = retention.saved_policy(records.run.storage)
        if policy is None:
            return _no_retention(None)
        newest = max((entry.step for entry in living(found) if entry.manifest is not None), default=0)
        decisions = retention.decide(records.run.storage, policy, newest, found, records.set_aside)
    except (HoldfastError, OSError) as error:
        return _no_retention(str(error))
    rows = [
        {
            "folder": decision.entry.folder,
            "keep": decision.stays,
            "why": ", ".join(decision.reasons) or "not kept by the policy",
        }
        for decision in decisions
    ]
    step, folders = _next(records, policy, found)
    return {"policy": str(policy), "rows": rows, "next": folders, "next_step": step, "problem": None}


def _no_retention(problem: str | None) -> dict[str, Any]:
    return {"policy": None, "rows": [], "next": [], "next_step": None, "problem": problem}


def _next(records: RunRecords, policy: Policy, found: list[Committed]) -> tuple[int | None, list[str]]:
    """Return the step that the next save is taken to be, after the usual number of steps, and what it would delete."""
    alive = [entry for entry in living(found) if entry.manifest is not None]
    if not alive:
        return None, []
    steps = [entry.step for entry in alive]
    gap = median_low([b - a for a, b in itertools.pairwise(steps[-4:])] or [1])  # of older steps every n-th may be left
    coming = alive[-1]
    assert coming.manifest is not None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    step = coming.step + max(1, gap)
    manifest = replace(coming.manifest, step=step, attempt="", created=now, metrics={}, abandons=(), skips=())
    ahead = [*found, Committed(step, "", manifest)]
    decisions = retention.decide(records.run.storage, policy, step, ahead, records.set_aside)
    return step, [decision.entry.folder for decision in decisions if not decision.stays]


def _flights(storage: SharedStorage) -> list[Any]:
    try:
        return list(saves_in_flight(storage)) if storage.exists() else []
    except (HoldfastError, OSError):
        return []


@dataclass(slots=True)
class _Heard:
    """The last status of a rank that differed from the one before, and when that was."""

    rank: FlightRank
    at: float


class FlightWatch:
    """The saves in flight of one run; remembers when each rank was heard of."""

    def __init__(self, storage: SharedStorage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._last: list[dict[str, Any]] = []
        self._heard: dict[tuple[str, int], _Heard] = {}
        self._since: dict[str, str] = {}

    def fields(self) -> list[dict[str, Any]]:
        """Return the saves in flight with the progress of every rank."""
        if not self._lock.acquire(blocking=False):
            return self._last  # another thread waits for the storage
        try:
            self._last = self._look()
            return self._last
        finally:
            self._lock.release()

    def _look(self) -> list[dict[str, Any]]:
        flights = _flights(self._storage)
        attempts = {flight.attempt for flight in flights}
        self._heard = {key: heard for key, heard in self._heard.items() if key[0] in attempts}
        self._since = {attempt: since for attempt, since in self._since.items() if attempt in attempts}
        found = []
        for flight in flights:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            ranks = flight_ranks(self._storage, flight.attempt)[:_RANKS]
            found.append(
                {
                    "attempt": flight.attempt,
                    "step": flight.step,
                    "phase": flight.phase[:200],
                    "written": flight.written,
                    "total": flight.total,
                    "world": flight.world,
                    "reported": flight.reported,
                    "since": self._since.setdefault(flight.attempt, now),
                    "ranks": [self._rank(flight.attempt, rank) for rank in ranks],
                }
            )
        return found

    def _rank(self, attempt: str, rank: FlightRank) -> dict[str, Any]:
        now = time.monotonic()
        heard = self._heard.get((attempt, rank.rank))
        if heard is None or heard.rank != rank:
            heard = self._heard[attempt, rank.rank] = _Heard(rank, now)
        silent = round(now - heard.at, 1)
        problem = rank.problem
        if problem is None and not rank.has_reported and silent > _SILENT_S:
            problem = f"silent for {silent:.0f} s: its writer may be dead, or its host"
        return {
            "rank": rank.rank,
            "host": rank.host,
            "phase": "done" if rank.has_reported else rank.phase[:200],
            "written": rank.written,
            "total": rank.total,
            "silent_s": silent,
            "problem": problem,
        }
