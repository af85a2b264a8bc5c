"""Captures of one rank: started at the call, guarded by the optimizers' hooks, finished on a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapters.saving.optimizer_forecast import stepped_tensors
from holdfast.adapters.saving.save_item import SaveItem
from holdfast.capture.copy import Copier, Item, Pending
from holdfast.capture.copy_targets import Spots
from holdfast.capture.cuda_threads import current_device, enter_thread
from holdfast.capture.hooks import StepHooks
from holdfast.layout.placement import Part
from holdfast.plan.writer_job import Span

GRAPH_NOTICE = "an optimizer steps inside a CUDA graph, where nothing can wait: its tensors are captured at the call"


@dataclass(frozen=True, slots=True)
class _Watched:
    """A capture that the thread waits for, and whom it tells."""

    pending: Pending
    done: Callable[[float], None]
    lost: Callable[[Exception], None]


class Capturer:
    """Takes the state of a rank into its arena, while training goes on."""

    def __init__(self) -> None:
        self.hooks = StepHooks()
        self.copier = Copier()
        self._queue: queue.Queue[_Watched | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def capture(
        self,
        sources: Iterable[tuple[SaveItem, Part, Span]],
        optimizers: Sequence[Any],
        spots: Spots,
        done: Callable[[float], None],
        lost: Callable[[Exception], None],
    ) -> None:
        """Start to copy. `done` is told when the copy began, once it is whole; `lost` is told what went wrong.

        Without CUDA tensors all is copied when this returns, and `done` has been called.
        """
        items = self._items(sources, optimizers, spots)
        pending = self.copier.start(items, spots, self.hooks.interval_s)
        self.hooks.guard(pending.released)
        if pending.done:
            self._need_thread()
            self._queue.put(_Watched(pending, done, lost))
        else:
            done(pending.started)

    def _items(
        self, sources: Iterable[tuple[SaveItem, Part, Span]], optimizers: Sequence[Any], spots: Spots
    ) -> list[Item]:
        trusted = self.hooks.trusted(optimizers)
        guarded = {
            tensor.untyped_storage().data_ptr() for optimizer in trusted for tensor in stepped_tensors(optimizer)
        }
        items = []
        for (save_item, part, span), spot in zip(sources, spots.spots, strict=True):
            local = save_item.holder.local
            owned = bool(guarded) and local.is_cuda and local.untyped_storage().data_ptr() in guarded
            items.append(Item(save_item, part, span, spot, owned))
        return items

    def _need_thread(self) -> None:
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
                watched.done(watched.pending.started)
            except Exception as error:  # noqa: BLE001  (training goes on; who saves tells of it)
                watched.lost(error)

    def notice(self) -> str:
        """What a user should know about the captures of this run, if anything."""
        return GRAPH_NOTICE if self.hooks.graphed() else ""

    def warm(self, devices: Iterable[torch.device]) -> None:
        self.copier.warm(devices)

    def probe(self, devices: Iterable[torch.device], arena: torch.Tensor) -> None:
        """Measure how fast copies to an unused arena are."""
        for device in devices:
            if device.type == "cuda":
                self.copier.probe(device, arena)

    def close(self, timeout_s: float) -> None:
        self.hooks.detach()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
