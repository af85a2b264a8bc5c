"""Captures of one rank: started by a save, protected by optimizer hooks, finished on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapters.saving.optimizer_forecast import stepped_tensors
from holdfast.adapters.saving.save_item import SaveItem
from holdfast.capture.copy import Copier, CopyItem, PendingCapture
from holdfast.capture.copy_targets import CopyTargets
from holdfast.capture.cuda_threads import current_device, enter_thread
from holdfast.capture.hooks import StepHooks
from holdfast.layout.placement import ShardBox
from holdfast.plan.writer_job import ArenaSpan

GRAPH_NOTICE = "an optimizer steps inside a CUDA graph, where no hook can wait: its tensors are captured during save"


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
        if pending.done:
            self._ensure_thread()
            self._queue.put(_WatchedCapture(pending, on_done, on_error))
        else:
            on_done(pending.started)

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
                rate = watched.pending.wait()
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
