"""When to save: occasions (steps, seconds, signals, failure rate), Daly's interval, the schedule of all ranks.

when=holdfast.when.steps(1000) | holdfast.when.preempted() | holdfast.when.auto(failures_per_day=2)

A step is saved if any of the combined occasions is due.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.durations import Duration, parse_seconds
from holdfast.core.errors import InvalidArgument
from holdfast.core.ranks import Ranks
from holdfast.engine.save_handle import SaveHandle

_DAY_S = 86400.0
_UNMEASURED_S = 60.0  # `auto` saves once after this time, to measure the cost of a save
_LEAST_COST_S = 0.001
_POLL_S = 1.0  # interval at which ranks exchange received signals
_MOST_STEPS = 100  # between two polls
_WRITING = 1.2  # minimum interval between saves, relative to the time to write one


@dataclass(frozen=True, slots=True)
class Occasion:
    """When to save: by steps, by seconds, on signals, or by the rate of failures and the cost of saves."""

    steps: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    signals: tuple[int, ...] = ()
    failures_s: float | None = None  # the mean time between failures

    def __or__(self, other: object) -> Occasion:
        if not isinstance(other, Occasion):
            return NotImplemented
        known = [failures_s for failures_s in (self.failures_s, other.failures_s) if failures_s is not None]
        return Occasion(
            self.steps + other.steps,
            self.seconds + other.seconds,
            tuple(sorted({*self.signals, *other.signals})),
            min(known, default=None),
        )


def steps(count: int) -> Occasion:
    """Save every step that is a multiple of `count`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgument(f"steps({count!r}): the count must be an integer of at least 1")
    return Occasion(steps=(count,))


def seconds(duration: Duration) -> Occasion:
    """Save when this long has passed since the last save: seconds, a timedelta, or a string such as "10m"."""
    return Occasion(seconds=(parse_seconds(duration, "seconds"),))


def preempted(*signals: str) -> Occasion:
    """Save when a signal announces the end of the process: SIGTERM, or the named signals, such as "SIGUSR1".

    All ranks save the step after the signal, even if only one rank received it. From then on
    `checkpointer.preempted` is True, and the loop should end.
    """
    try:
        return Occasion(signals=tuple(sorted({int(signal.Signals[name]) for name in signals or ("SIGTERM",)})))
    except KeyError as error:
        raise InvalidArgument(f"preempted: there is no signal {error}") from None


def auto(*, failures_per_day: float | None = None, mean_time_between_failures: Duration | None = None) -> Occasion:
    """Save at the interval that minimizes lost time, given the rate of failures and the measured cost of a save.

    Uses Daly's formula with the time that training waits for a save. The interval is never shorter than
    the time to write a save.
    """
    if (failures_per_day is None) == (mean_time_between_failures is None):
        raise InvalidArgument("auto: pass either failures_per_day or mean_time_between_failures")
    if mean_time_between_failures is not None:
        return Occasion(failures_s=parse_seconds(mean_time_between_failures, "auto"))
    if isinstance(failures_per_day, bool) or not isinstance(failures_per_day, int | float) or not failures_per_day > 0:
        raise InvalidArgument(f"auto(failures_per_day={failures_per_day!r}): the rate must be a positive number")
    return Occasion(failures_s=_DAY_S / failures_per_day)


def best_interval_s(cost_s: float, failures_s: float) -> float:
    """Return the interval between saves that minimizes lost time, by Daly's higher-order formula."""
    cost_s = max(cost_s, _LEAST_COST_S)
    if cost_s >= 2 * failures_s:
        return failures_s
    share = cost_s / (2 * failures_s)
    return math.sqrt(2 * cost_s * failures_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


class Schedule:
    """Decides whether to save a step, with the same result on every rank.

    Multiples of steps need no communication. For times and signals the ranks exchange a few numbers,
    but not at every step: they agree on the next step to poll by the duration of steps.
    """

    def __init__(
        self, occasion: Occasion, clock: Callable[[], float] = time.monotonic, grace_s: float = math.inf
    ) -> None:
        self._occasion = occasion
        self._grace_s = grace_s
        self._clock = clock
        self._saved_at = clock()
        self._polled: tuple[int, float] | None = None
        self._poll_at = 0
        self._last: SaveHandle | None = None
        self._measured = (0.0, 0.0)  # seconds of stall and of writing of the last completed save
        self._signaled_at: float | None = None
        self._answered = False
        self.preempted = False

    @property
    def signals(self) -> tuple[int, ...]:
        return self._occasion.signals

    def accept_signal(self, number: int) -> bool:
        """Return True if a received signal requests a save: the first one, and repeats until that save is done.

        A signal after that save, or after `grace_s`, is not accepted and ends the process.
        """
        if number not in self._occasion.signals or self._answered:
            return False
        if self._signaled_at is None:
            self._signaled_at = self._clock()
        return self._clock() - self._signaled_at <= self._grace_s

    def is_due(self, ranks: Ranks, step: int) -> bool:
        """Return True if this step is to be saved. Every rank must call it with the same step."""
        due = any(step > 0 and step % count == 0 for count in self._occasion.steps)
        went_back = self._polled is not None and step < self._polled[0]
        if self._needs_polls and (step >= self._poll_at or went_back):
            due = self._poll(ranks, step) or due
        return due

    @property
    def _needs_polls(self) -> bool:
        return bool(self._occasion.seconds or self._occasion.signals or self._occasion.failures_s)

    def _poll(self, ranks: Ranks, step: int) -> bool:
        now = self._clock()
        before, since = self._polled or (step, now)
        pace_s = (now - since) / (step - before) if step > before else 0.0
        busy = self._measure()
        own = [now - self._saved_at, pace_s, *self._measured]
        flags = [int(self._signaled_at is not None), int(busy)]
        *longest, any_signal, any_busy = ranks.all_max([*(int(seconds * 1e6) for seconds in own), *flags])
        elapsed_s, pace_s, cost_s, write_s = (value / 1e6 for value in longest)
        newly = bool(any_signal) and not self.preempted
        self.preempted = self.preempted or bool(any_signal)
        left_s = self._interval_s(cost_s, write_s) - elapsed_s
        self._polled = (step, now)
        self._poll_at = step + _steps_until(left_s, pace_s, bool(self._occasion.signals), ranks.world)
        return newly or (left_s <= 0 and not any_busy)  # times wait for the save in flight; a signal does not

    def _measure(self) -> bool:
        """Record the cost and duration of the last save once it is done; returns True while it is in flight."""
        if self._last is None:
            return False
        if self._last.done() and self._last.error is None:
            self._measured = (max(self._last.stall_ms / 1000, _LEAST_COST_S), self._last.seconds)
        return not self._last.done()

    def _interval_s(self, cost_s: float, write_s: float) -> float:
        intervals = [*self._occasion.seconds]
        if self._occasion.failures_s is not None:
            measured = best_interval_s(cost_s, self._occasion.failures_s) if cost_s else _UNMEASURED_S
            intervals.append(max(measured, write_s * _WRITING))
        return min(intervals, default=math.inf)

    def answered(self) -> None:
        """Called once the save that a signal requested is done: further signals are not accepted."""
        self._answered = True

    def saved(self, handle: SaveHandle) -> None:
        """Called when any save begins: times count from here. A skipped save does not count."""
        if not handle.skipped:
            self._saved_at = self._clock()
            self._last = handle


def _steps_until(left_s: float, pace_s: float, listens: bool, world: int) -> int:
    """Return the number of steps until the next poll: half of the remaining time, at most a second with signals."""
    if world == 1 or pace_s <= 0:
        return 1
    pause_s = min(left_s / 2, _POLL_S if listens else math.inf)
    return max(1, min(_MOST_STEPS, int(pause_s / pace_s) if math.isfinite(pause_s) else _MOST_STEPS))
