"""Captures of a rank: optimizer step hooks that wait for copies, the thread that completes them, CUDA graphs.

An optimizer's step waits for the capture of the tensors that it is about to change. The wait is
on the device, between streams; the host continues. A hook is trusted only after it has fired:
steps inside CUDA graphs and some compiled steps bypass it.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast.adapters.optimizer import inner_optimizer
from holdfast.adapters.saving.collect import SaveItem
from holdfast.adapters.saving.optimizer_forecast import stepped_tensors
from holdfast.capture.copy import Copier, CopyItem, CopyTargets, PendingCapture
from holdfast.capture.cuda_threads import current_device, enter_thread
from holdfast.layout.placement import ShardBox
from holdfast.plan.writer_job import ArenaSpan

_INTERVALS = 3
_REHEARSED = 50  # copies of each kind; their code is then compiled for the types that it meets


# Every capture of this process, so that code that changes weights outside of optimizers can wait.
_ALL: weakref.WeakSet[StepHooks] = weakref.WeakSet()
GRAPH_NOTICE = "an optimizer steps inside a CUDA graph, where no hook can wait: its tensors are captured during save"


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


def _copied_bytes(item: CopyItem) -> int:
    return item.span.bytes


@dataclass(frozen=True, slots=True)
class _WatchedCapture:
    """A capture that the thread waits for, and its callbacks."""

    pending: PendingCapture
    on_done: Callable[[float], None]
    on_error: Callable[[Exception], None]


class Capturer:
    """Copies the state of a rank into its arena while training continues."""

    def __init__(self) -> None:
        self.hooks = StepHooks()
        self.copier = Copier()
        self._queue: queue.Queue[_WatchedCapture | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def capture(
        self,
        sources: Iterable[tuple[SaveItem, ShardBox, ArenaSpan]],
        optimizers: Sequence[Any],
        targets: CopyTargets,
        on_done: Callable[[float], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Start the copy. When it is complete, `on_done` is called with its start time; on failure `on_error`.

        Without CUDA tensors everything is copied on return, and `on_done` has been called.
        """
        items = self._items(sources, optimizers, targets)
        pending = self.copier.start(items, targets, self.hooks.interval_s)
        self.hooks.guard(pending.released)
        if pending.to_host:
            self._ensure_thread()
            self._queue.put(_WatchedCapture(pending, on_done, on_error))
        else:
            on_done(pending.started)

    def rehearse(self, sources: Iterable[tuple[SaveItem, ShardBox, ArenaSpan]], targets: CopyTargets) -> None:
        """Copy a few tensors of each kind from devices, before the first save needs the code and the kernels.

        Nothing may be kept in the arena. What it gets may be torn by a step, and nothing reads it.
        """
        kinds: dict[Any, list[CopyItem]] = {}
        for (item, part, span), target in zip(sources, targets.targets, strict=True):
            if item.holder.local.is_cuda:
                kind = target.mirrored, target.whole is None, span.place.spec.dtype, item.cast
                kinds.setdefault(kind, []).append(CopyItem(item, part, span, target, owned=False))
        few = [item for kind in kinds.values() for item in sorted(kind, key=_copied_bytes)[:_REHEARSED]]
        if few:
            self.copier.start([*few, *(replace(item, owned=True) for item in few)], targets, None).finish()

    def _items(
        self, sources: Iterable[tuple[SaveItem, ShardBox, ArenaSpan]], optimizers: Sequence[Any], targets: CopyTargets
    ) -> list[CopyItem]:
        trusted = self.hooks.trusted(optimizers)
        guarded = {
            tensor.untyped_storage().data_ptr() for optimizer in trusted for tensor in stepped_tensors(optimizer)
        }
        items = []
        for (save_item, part, span), target in zip(sources, targets.targets, strict=True):
            local = save_item.holder.local
            owned = bool(guarded) and local.is_cuda and local.untyped_storage().data_ptr() in guarded
            items.append(CopyItem(save_item, part, span, target, owned))
        return items

    def _ensure_thread(self) -> None:
        if self._thread is None:
            device = (current_device(),)
            self._thread = threading.Thread(target=self._finish, args=device, name="holdfast-capture", daemon=True)
            self._thread.start()

    def _finish(self, device: int | None) -> None:
        enter_thread(device)
        while (watched := self._queue.get()) is not None:
            try:
                rate = watched.pending.finish()
                if rate:
                    self.copier.rate = rate
                watched.on_done(watched.pending.started)
            except Exception as error:  # noqa: BLE001  (training continues; the save reports the error)
                watched.on_error(error)

    def notice(self) -> str:
        """Return a notice for the user about the captures of this run, or ""."""
        return GRAPH_NOTICE if self.hooks.graphed() else ""

    def warm_up(self, devices: Iterable[torch.device]) -> None:
        self.copier.warm_up(devices)

    def probe(self, devices: Iterable[torch.device], arena: torch.Tensor) -> None:
        """Measure the speed of copies to an unused arena."""
        for device in devices:
            if device.type == "cuda":
                self.copier.probe(device, arena)

    def close(self, timeout_s: float) -> None:
        self.hooks.detach()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
