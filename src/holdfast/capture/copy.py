"""Copies from live tensors into the arena.

CPU tensors are copied before `start` returns. CUDA tensors are copied on a side stream: what
an optimizer owns while the next forward and backward run, everything else by way of a copy on
the device, so that the compute stream waits for no more than that. Small tensors are gathered
on the device first and cross together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from holdfast.adapters.saving.save_item import SaveItem, stored_view
from holdfast.adapters.tensors import RAW_DTYPES
from holdfast.capture.copy_targets import Spot, Spots
from holdfast.layout.flat import flat_boxes
from holdfast.layout.placement import Part
from holdfast.plan.writer_job import Span

_FIRST_RATE = 20e9  # bytes a second to the host, until it has been measured
_PROBE_BYTES = 64 << 20
_FIRST_INTERVAL_S = 0.1
_USED_OF_STEP = 0.8  # of a step's time, before the next optimizer step
_SPARE_BYTES = 1 << 30
_SPARE_SHARE = 0.05
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Item:
    """A span of the arena, its spot, and the live part it is copied from; `owned` if an optimizer step guards it."""

    save_item: SaveItem
    part: Part
    span: Span
    spot: Spot
    owned: bool

    @property
    def device(self) -> torch.device:
        return self.save_item.holder.local.device


@dataclass(slots=True)
class Pending:
    """A capture in flight: what must stay alive until it is done, and when it is."""

    bytes: int = 0
    started: float = field(default_factory=time.perf_counter)
    released: list[tuple[torch.device, torch.cuda.Event]] = field(default_factory=list)
    done: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    alive: list[torch.Tensor] = field(default_factory=list)

    def wait(self) -> float:
        """Wait on the host until all is captured; returns the bytes per second of the copies, 0 if unknown."""
        milliseconds = 0.0
        for begin, end in self.done:
            end.synchronize()
            milliseconds += begin.elapsed_time(end)
        self.alive.clear()
        return self.bytes / milliseconds * 1000 if milliseconds else 0.0


class Copier:
    """Starts captures; remembers streams and how fast copies went."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._staged: dict[torch.device, int] = {}
        self.rate = _FIRST_RATE

    def warm(self, devices: Iterable[torch.device]) -> None:
        """Make streams and load kernels: the first time they take a while."""
        for device in devices:
            if device.type == "cuda":
                with torch.cuda.stream(self.stream(device)):
                    for dtype in RAW_DTYPES.values():
                        first, second = torch.zeros((2, 8), dtype=dtype, device=device)
                        torch._foreach_copy_([first, second], [second, first])
                        first.copy_(second)

    def probe(self, device: torch.device, arena: torch.Tensor) -> None:
        """Measure how fast copies to the arena are, before it holds anything."""
        size = min(_PROBE_BYTES, arena.numel())
        with torch.cuda.stream(self.stream(device)):
            source = self._buffer(device, size) if size <= self._room(device) else None
            if source is None:
                return
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            arena[:size].copy_(source, non_blocking=True)
            end.record()
        end.synchronize()
        self.rate = size / begin.elapsed_time(end) * 1000

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream of a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def start(self, items: Sequence[Item], spots: Spots, interval_s: float | None) -> Pending:
        """Begin to copy all items; those on the CPU are copied when this returns."""
        here = [item for item in items if not item.save_item.holder.local.is_cuda]
        away = [item for item in items if item.save_item.holder.local.is_cuda] if len(here) < len(items) else []
        pending = Pending(bytes=sum(item.span.bytes for item in away))
        for device in sorted({item.device for item in away}, key=str):
            own = [item for item in away if item.device == device]
            self._start_device(device, own, spots, interval_s or _FIRST_INTERVAL_S, pending)
        for item in here:
            for target, source in _pairs(item, item.spot):
                target.copy_(source)
        return pending

    def _start_device(
        self, device: torch.device, items: Sequence[Item], spots: Spots, interval_s: float, pending: Pending
    ) -> None:
        side = self.stream(device)
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side), torch.no_grad():
            mirrored = [item for item in items if item.spot.mirrored]
            at_once = [item for item in items if not item.owned and not item.spot.mirrored]
            owned = [item for item in items if item.owned and not item.spot.mirrored]
            owned.sort(key=lambda item: item.span.bytes)
            window = int(interval_s * _USED_OF_STEP * self.rate)
            room = self._room(device)
            staged, direct = _within(at_once, room)
            overflow = _beyond(owned, window, room - sum(map(_aligned, staged)))
            buffer = self._buffer(device, sum(map(_aligned, [*staged, *overflow])))
            if buffer is None:
                staged, direct, overflow = [], at_once, []
            owned = owned[: len(owned) - len(overflow)]
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record(side)
            self._gather(mirrored, pending)
            self._copy(direct, pending)
            copies = self._stage(buffer, [*staged, *overflow], pending)
            if mirrored or at_once:
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record(side)
                current.wait_event(ready)
            self._copy(owned, pending)
            released = torch.cuda.Event()  # type: ignore[no-untyped-call]
            released.record(side)
            pending.released.append((device, released))
            copies += [(mirror.begin, mirror.memory) for mirror in spots.mirrors if mirror.device == device]
            for at, copy in copies:
                spots.arena[at : at + copy.numel()].copy_(copy, non_blocking=True)
            end = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            end.record(side)
            pending.done.append((begin, end))

    def _gather(self, items: Iterable[Item], pending: Pending) -> None:
        """Copy small items into their mirrors, with few launches."""
        by_width: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for item in items:
            for target, source in _pairs(item, item.spot):
                targets, sources = by_width.setdefault(target.dtype, ([], []))
                targets.append(target)
                sources.append(source)
        for targets, sources in by_width.values():
            torch._foreach_copy_(targets, sources)
            pending.alive += sources

    def _copy(self, items: Iterable[Item], pending: Pending) -> None:
        for item in items:
            for target, source in _pairs(item, item.spot):
                target.copy_(source, non_blocking=True)
                pending.alive.append(source)

    def _room(self, device: torch.device) -> int:
        """Bytes on the device that nobody uses: beyond what the allocator has ever needed, with some to spare."""
        free, total = torch.cuda.mem_get_info(device)
        spare = max(_SPARE_BYTES, int(total * _SPARE_SHARE))
        return max(self._staged.get(device, 0), free - spare, 0)

    def _buffer(self, device: torch.device, size: int) -> torch.Tensor | None:
        """Memory of the device to copy into, None if it cannot be had."""
        try:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            self._staged[device] = 0
            return None
        self._staged[device] = max(size, self._staged.get(device, 0))
        return buffer

    def _stage(
        self, buffer: torch.Tensor | None, items: Sequence[Item], pending: Pending
    ) -> list[tuple[int, torch.Tensor]]:
        """Copy items on the device, into one buffer; gives each copy with its place in the arena."""
        if buffer is None:
            return []
        pending.alive.append(buffer)
        copies = []
        at = 0
        for item in items:
            for target, source in _pairs(item, Spot(buffer, at, None, mirrored=False)):
                target.copy_(source)
                pending.alive.append(source)
            copies.append((item.span.offset, buffer[at : at + item.span.bytes]))
            at += _aligned(item)
        return copies


def _aligned(item: Item) -> int:
    return -(-item.span.bytes // _ALIGNMENT) * _ALIGNMENT


def _within(items: Sequence[Item], room: int) -> tuple[list[Item], list[Item]]:
    """The items that fit into `room`, small ones first, and the rest."""
    inside: list[Item] = []
    outside: list[Item] = []
    for item in sorted(items, key=lambda item: item.span.bytes):
        room -= _aligned(item)
        (inside if room >= 0 else outside).append(item)
    return inside, outside


def _beyond(items: Sequence[Item], window: int, room: int) -> list[Item]:
    """The last of the items, as many as take the copy beyond `window` bytes and fit into `room`."""
    excess = sum(item.span.bytes for item in items) - window
    chosen: list[Item] = []
    for item in reversed(items):
        if excess <= 0 or _aligned(item) > room:
            break
        chosen.append(item)
        excess -= item.span.bytes
        room -= _aligned(item)
    return chosen


def _pairs(item: Item, spot: Spot) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Targets at a spot with the live views to be copied into them, as integers of the same width."""
    span, at = item.span, spot.at
    view = stored_view(item.save_item, item.part)
    width = view.element_size()
    raw = view.view(RAW_DTYPES[width])
    if spot.whole is not None:
        yield spot.whole, raw
    elif (span.begin, span.end) == (0, view.numel()):
        yield _target(spot.memory, at, raw), raw
    elif view.is_contiguous():
        part = raw.reshape(-1)[span.begin : span.end]
        yield _target(spot.memory, at, part), part
    else:
        for box in flat_boxes(tuple(view.shape), span.begin, span.end):
            part = raw[box.within(box.full(tuple(view.shape)))]
            yield _target(spot.memory, at, part), part
            at += part.numel() * width


def _target(memory: torch.Tensor, at: int, source: torch.Tensor) -> torch.Tensor:
    span = memory[at : at + source.numel() * source.element_size()]
    return span.view(source.dtype).view(source.shape)
