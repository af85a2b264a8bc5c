"""Hooks on optimizers: a step waits for the capture of the tensors that it is about to change.

The wait is on the device, between streams; the host continues. A hook is trusted only after it
has fired: steps inside CUDA graphs and some compiled steps bypass it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from holdfast.adapters.optimizer import inner_optimizer

_INTERVALS = 3


# Every capture of this process, so that code that changes weights outside of optimizers can wait.
_ALL: weakref.WeakSet[StepHooks] = weakref.WeakSet()


def wait_for_captures() -> None:
    """Make the compute stream wait for captures in flight, as optimizer steps do."""
    for hooks in list(_ALL):
        hooks.wait()


class StepHooks:
    """Hooks on every optimizer of a state, and the times when they fired."""

    def __init__(self) -> None:
        self._handles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._fired: weakref.WeakSet[Any] = weakref.WeakSet()
        self._graphed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        _ALL.add(self)
        self._watchers: list[Callable[[], bool]] = []
        self._last: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self._intervals: list[float] = []

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Hook the optimizers that are not hooked yet, if they are torch optimizers."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                inner = inner_optimizer(optimizer)
                # A wrapper that never called torch's constructor has no hooks: it is not trusted either.
                if inner not in self._handles and hasattr(inner, "_optimizer_step_pre_hooks"):
                    self._handles[inner] = inner.register_step_pre_hook(self._before_step)

    def detach(self) -> None:
        for handle in list(self._handles.values()):
            handle.remove()
        self._handles.clear()
        self._watchers.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._graphed.add(optimizer)  # graph replays do not call the hook
            return
        self.wait()
        now = time.monotonic()
        if optimizer in self._last:
            self._intervals = [*self._intervals[-_INTERVALS + 1 :], now - self._last[optimizer]]
        self._last[optimizer] = now
        self._fired.add(optimizer)
        self._watchers = [watcher for watcher in self._watchers if not watcher()]

    def each_step(self, watcher: Callable[[], bool]) -> None:
        """Call `watcher` before every step until it returns True."""
        self._watchers.append(watcher)

    def wait(self) -> None:
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)

    def guard(self, events: Iterable[tuple[torch.device, torch.cuda.Event]]) -> None:
        """Make the next step wait for these events."""
        self._events = list(events)

    @property
    def interval_s(self) -> float | None:
        """The duration of a step, as the shortest of the last few; None if not known yet."""
        return min(self._intervals, default=None)

    def trusted(self, optimizers: Iterable[Any]) -> list[Any]:
        """Return the optimizers whose next step will wait: hooked, fired since the last call, not in a graph."""
        found = []
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                continue
            inner = inner_optimizer(optimizer)
            if inner in self._handles and inner in self._fired and inner not in self._graphed:
                found.append(inner)
        self._fired.clear()
        return found

    def graphed(self) -> bool:
        return bool(len(self._graphed))
