"""Where the extra time of a save goes, for `benchmarks.trainer_stall`: its call, and the slower steps after it.

Steps are compared with those at the same place of an interval in the training without saves of the same round. A step
that lasts longer is counted by the state of the save when it began: being captured, being written, or committed.
The device is not waited for; Trainer reads the loss of every step, so that the clock of the host follows the device.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("while captured", "while written", "once committed")
# Parts of the call, and the methods that are timed for them: module, class, method.
_CALL_PARTS = {
    "state of the trainer": ("holdfast.integrations.transformers.plugin", "TrainerPlugin", "_state"),
    "files": ("holdfast.integrations.transformers.plugin", "TrainerPlugin", "_files"),
    "wait for the save before": ("holdfast.engine.background_save", "BackgroundSaver", "wait_for_turn"),
    "collect": ("holdfast.engine.planner", "Planner", "local_state"),
    "plan": ("holdfast.engine.background_save", "BackgroundSaver", "_get_plan"),
    "order": ("holdfast.engine.background_save", "BackgroundSaver", "_new_flight"),
    "launch": ("holdfast.engine.flight", "FlightControl", "launch"),
    "start the copies": ("holdfast.capture.capturer", "Capturer", "capture"),
}


@dataclass
class Timeline:
    """The clock of one training: the ends of its steps, its saves, and the times of their events."""

    step_ends: dict[int, float] = field(default_factory=dict)
    save_ends: dict[int, float] = field(default_factory=dict)  # by step
    calls: dict[int, float] = field(default_factory=dict)  # seconds of the call by step
    events: dict[str, dict[int, float]] = field(default_factory=lambda: {"captured": {}, "published": {}})
    parts: dict[str, list[float]] = field(default_factory=dict)  # seconds of each part of the call

    def listen(self, event: Any) -> None:
        """Note when a step was captured and published; called on the threads of the save."""
        if event.name in self.events and event.step is not None:
            self.events[event.name][event.step] = time.perf_counter()

    def step_seconds(self) -> dict[int, float]:
        """Return the duration of each step, without the call of a save before it."""
        steps = sorted(self.step_ends)
        return {
            step: self.step_ends[step] - max(self.step_ends[before], self.save_ends.get(before, 0.0))
            for before, step in itertools.pairwise(steps)
        }

    def phase_at(self, save: int, at: float) -> str:
        """Return what becomes of a save at a time."""
        captured, published = (self.events[name].get(save) for name in ("captured", "published"))
        if captured is None or published is None:  # Trainer's own saves are over when the call returns
            return PHASES[2]
        return PHASES[0] if at < captured else PHASES[1] if at < published else PHASES[2]


def time_saves(trainer: Any, timeline: Timeline, profile: Any) -> None:
    """Time each call of a save from the outside, and profile it from the second one on."""
    save = trainer._save_checkpoint

    def timed(*args: Any, **kwargs: Any) -> Any:
        step = trainer.state.global_step
        started = time.perf_counter()
        if profile is not None and timeline.calls:
            result = profile.runcall(save, *args, **kwargs)
        else:
            result = save(*args, **kwargs)
        timeline.save_ends[step] = time.perf_counter()
        timeline.calls[step] = timeline.save_ends[step] - started
        return result

    trainer._save_checkpoint = timed


class TimedParts:
    """Times the parts of the call within a `with` block; a call inside of another part counts for both."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        from importlib import import_module

        for name, (module, owner, method) in _CALL_PARTS.items():
            kind = getattr(import_module(module), owner)
            self._replaced.append((kind, method, getattr(kind, method)))
            setattr(kind, method, _timed(getattr(kind, method), self._timeline.parts.setdefault(name, [])))

    def __exit__(self, *_: object) -> None:
        for kind, method, original in self._replaced:
            setattr(kind, method, original)


def _timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - started)

    return call


def usual_steps(plain: Iterable[Timeline], every: int) -> dict[int, float]:
    """Return the median duration of a step without saves, by its place in an interval."""
    found: dict[int, list[float]] = {}
    for timeline in plain:
        for step, seconds in timeline.step_seconds().items():
            if step > every:
                found.setdefault(step % every, []).append(seconds)
    return {place: statistics.median(seconds) for place, seconds in found.items()}


def breakdown(timeline: Timeline, usual: Mapping[int, float], every: int) -> list[dict[str, float]]:
    """Return the extra milliseconds of each save but the first: its call, and the steps up to the next save."""
    seconds = timeline.step_seconds()
    rows = []
    for save in sorted(timeline.calls)[1:]:
        row = dict.fromkeys(("call", "first step", *PHASES), 0.0)
        row["call"] = timeline.calls[save] * 1000
        for step in range(save + 1, save + every + 1):
            if step not in seconds or step % every not in usual:
                continue
            began = max(timeline.step_ends[step - 1], timeline.save_ends.get(step - 1, 0.0))
            extra_ms = (seconds[step] - usual[step % every]) * 1000
            row[timeline.phase_at(save, began)] += extra_ms
            row["first step"] += extra_ms if step == save + 1 else 0.0
        rows.append(row)
    return rows


def print_breakdown(name: str, rows: list[dict[str, float]]) -> None:
    """Print the median and the largest of each part over the saves."""
    if not rows:
        return
    print(f"\n{name}, extra ms of a save (median, largest of {len(rows)}):")
    for part in rows[0]:
        values = [row[part] for row in rows]
        note = "   (part of the steps below)" if part == "first step" else ""
        print(f"  {part:18} {statistics.median(values):9.2f} {max(values):9.2f}{note}")


def print_call_parts(timelines: Iterable[Timeline]) -> dict[str, float]:
    """Print the median of each part of Holdfast's call, the first calls of a training left out."""
    medians: dict[str, float] = {}
    kept = list(timelines)
    for part in _CALL_PARTS:
        values = [one * 1000 for timeline in kept for one in _steady(timeline, part)]
        if values:
            medians[part] = statistics.median(values)
    print("\nParts of Holdfast's call, ms (medians):")
    for part, value in medians.items():
        print(f"  {part:25} {value:9.2f}")
    return medians


def _steady(timeline: Timeline, part: str) -> list[float]:
    """Return the seconds of a part in the calls of a training but the first."""
    seconds = timeline.parts.get(part, [])
    return seconds[-(len(timeline.calls) - 1) :] if len(timeline.calls) > 1 else []
