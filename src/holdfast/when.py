"""When to save: occasions are values, combined with `|`; a step is saved when any of them has come.

when=holdfast.when.steps(1000) | holdfast.when.preempted() | holdfast.when.auto(failures_per_day=2)
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
_UNMEASURED_S = 60.0  # `auto` saves once after this, to know what a save costs
_LEAST_COST_S = 0.001
_LOOK_S = 1.0  # how often ranks tell each other of a signal
_MOST_STEPS = 100  # between two looks
_WRITING = 1.2  # a save begins no sooner than the last one took to be written, and a little


@dataclass(frozen=True, slots=True)
class Occasion:
    """When to save: every so many steps, so many seconds, on signals, or as failures and costs suggest."""

    steps: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    signals: tuple[int, ...] = ()
    failures_s: float | None = None  # the mean time between failures

    def __or__(self, other: object) -> Occasion:
        if not isinstance(other, Occasion):
            return NotImplemented
        known = [given for given in (self.failures_s, other.failures_s) if given is not None]
        return Occasion(
            self.steps + other.steps,
            self.seconds + other.seconds,
            tuple(sorted({*self.signals, *other.signals})),
            min(known, default=None),
        )


def steps(count: int) -> Occasion:
    """Every step that is a multiple of `count`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgument(f"steps({count!r}): give a whole number from 1 on")
    return Occasion(steps=(count,))


def seconds(duration: Duration) -> Occasion:
    """When this long has passed since the last save: seconds, a timedelta, or a text such as "10m"."""
    return Occasion(seconds=(parse_seconds(duration, "seconds"),))


def preempted(*signals: str) -> Occasion:
    """When a signal says that the process will be ended: SIGTERM, or those that are named, such as "SIGUSR1".

    The step after the signal is saved, on every rank though only one heard it, and
    `checkpointer.preempted` is true from then on: the loop should end.
    """
    try:
        return Occasion(signals=tuple(sorted({int(signal.Signals[name]) for name in signals or ("SIGTERM",)})))
    except KeyError as error:
        raise InvalidArgument(f"preempted: there is no signal {error}") from None


def auto(*, failures_per_day: float | None = None, mean_time_between_failures: Duration | None = None) -> Occasion:
    """As often as loses the least time, by what a save is measured to cost and how often the run fails.

    The interval is Daly's, of the time that training waits for a save; it is never shorter than
    what a save takes to be written.
    """
    if (failures_per_day is None) == (mean_time_between_failures is None):
        raise InvalidArgument("auto: give failures_per_day or mean_time_between_failures")
    if mean_time_between_failures is not None:
        return Occasion(failures_s=parse_seconds(mean_time_between_failures, "auto"))
    if isinstance(failures_per_day, bool) or not isinstance(failures_per_day, int | float) or not failures_per_day > 0:
        raise InvalidArgument(f"auto(failures_per_day={failures_per_day!r}): give a number above 0")
    return Occasion(failures_s=_DAY_S / failures_per_day)


def best_interval_s(cost_s: float, failures_s: float) -> float:
    """The interval between saves that loses the least time, by Daly's formula of higher order."""
    cost_s = max(cost_s, _LEAST_COST_S)
    if cost_s >= 2 * failures_s:
        return failures_s
    share = cost_s / (2 * failures_s)
    return math.sqrt(2 * cost_s * failures_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


class Schedule:
    """Decides, alike on every rank, whether a step is to be saved.

    Multiples of steps need no word between ranks. For times and signals the ranks exchange a
    few numbers, not at every step: from how long steps take they agree on the next step to look.
    """

    def __init__(
        self, occasion: Occasion, clock: Callable[[], float] = time.monotonic, grace_s: float = math.inf
    ) -> None:
        self._occasion = occasion
        self._grace_s = grace_s
        self._clock = clock
        self._saved_at = clock()
        self._looked: tuple[int, float] | None = None
        self._look_at = 0
        self._last: SaveHandle | None = None
        self._known = (0.0, 0.0)  # what the last save that is over cost and took
        self._heard_at: float | None = None
        self._answered = False
        self.preempted = False

    @property
    def signals(self) -> tuple[int, ...]:
        return self._occasion.signals

    def heed(self, number: int) -> bool:
        """A signal came: whether it asks for a save, as the first does, and its echoes until that save is made.

        One that comes after it, or when `grace_s` is over, is not heeded: then it ends the process.
        """
        if number not in self._occasion.signals or self._answered:
            return False
        if self._heard_at is None:
            self._heard_at = self._clock()
        return self._clock() - self._heard_at <= self._grace_s

    def is_due(self, ranks: Ranks, step: int) -> bool:
        """Whether to save this step. Every rank asks, with the same step."""
        due = any(step > 0 and step % count == 0 for count in self._occasion.steps)
        went_back = self._looked is not None and step < self._looked[0]
        if self._needs_looks and (step >= self._look_at or went_back):
            due = self._look(ranks, step) or due
        return due

    @property
    def _needs_looks(self) -> bool:
        return bool(self._occasion.seconds or self._occasion.signals or self._occasion.failures_s)

    def _look(self, ranks: Ranks, step: int) -> bool:
        now = self._clock()
        before, since = self._looked or (step, now)
        pace_s = (now - since) / (step - before) if step > before else 0.0
        busy = self._measure()
        own = [now - self._saved_at, pace_s, *self._known]
        flags = [int(self._heard_at is not None), int(busy)]
        *told, heard, any_busy = ranks.all_max([*(int(seconds * 1e6) for seconds in own), *flags])
        elapsed_s, pace_s, cost_s, write_s = (value / 1e6 for value in told)
        newly = bool(heard) and not self.preempted
        self.preempted = self.preempted or bool(heard)
        left_s = self._interval_s(cost_s, write_s) - elapsed_s
        self._looked = (step, now)
        self._look_at = step + _steps_until(left_s, pace_s, bool(self._occasion.signals), ranks.world)
        return newly or (left_s <= 0 and not any_busy)  # times wait for the save in flight; a signal does not

    def _measure(self) -> bool:
        """Note what the last save cost and took, once it is over; whether it is still in flight."""
        if self._last is None:
            return False
        if self._last.done() and self._last.error is None:
            self._known = (max(self._last.stall_ms / 1000, _LEAST_COST_S), self._last.seconds)
        return not self._last.done()

    def _interval_s(self, cost_s: float, write_s: float) -> float:
        found = [*self._occasion.seconds]
        if self._occasion.failures_s is not None:
            measured = best_interval_s(cost_s, self._occasion.failures_s) if cost_s else _UNMEASURED_S
            found.append(max(measured, write_s * _WRITING))
        return min(found, default=math.inf)

    def answered(self) -> None:
        """The save that a signal asked for is made: another signal is not for us."""
        self._answered = True

    def saved(self, handle: SaveHandle) -> None:
        """A save began, whoever asked for it: times count from here. One that was skipped was none."""
        if not handle.skipped:
            self._saved_at = self._clock()
            self._last = handle


def _steps_until(left_s: float, pace_s: float, listens: bool, world: int) -> int:
    """How many steps the ranks need not talk: half of the time that is left, or a second if signals may come."""
    if world == 1 or pace_s <= 0:
        return 1
    pause_s = min(left_s / 2, _LOOK_S if listens else math.inf)
    return max(1, min(_MOST_STEPS, int(pause_s / pace_s) if math.isfinite(pause_s) else _MOST_STEPS))
