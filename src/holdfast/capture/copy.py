"""Copies from live tensors into the arena: side streams, staging buffers, mirrors of small tensors, measured speed.

CPU tensors are copied before `start` returns. CUDA tensors are copied on a side stream. Tensors
that an optimizer owns are copied while the next forward and backward run. All others are first
copied on the device, so that the compute stream waits only for that copy. Small tensors are
gathered in a mirror on the device and moved together. What was copied on the device is sent to the
host in portions, so that values that the trainer reads meanwhile pass between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from holdfast.adapters.saving.collect import SaveItem, stored_view
from holdfast.adapters.tensors import RAW_DTYPES
from holdfast.layout.box import flat_boxes
from holdfast.layout.placement import ShardBox
from holdfast.plan.writer_job import ArenaSpan

_FIRST_RATE = 20e9  # assumed bytes per second to the host, until measured
_PROBE_BYTES = 64 << 20
_FIRST_INTERVAL_S = 0.1
_USED_OF_STEP = 0.8  # usable share of a step's time before the next optimizer step
_SPARE_BYTES = 1 << 30
_SPARE_SHARE = 0.05
_ALIGNMENT = 512
_PORTION_BYTES = 64 << 20  # about a millisecond of copying to the host


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """The first target of a span's copy: byte `at` of `memory`, which may be a mirror.

    `whole` views the span with the shape of its shard, or is None if the span is only a part of the shard.
    """

    memory: torch.Tensor
    at: int
    whole: torch.Tensor | None
    mirrored: bool


@dataclass(frozen=True, slots=True)
class Mirror:
    """Adjacent small spans of one device: gathered there, one copy moves them to the arena."""

    device: torch.device
    begin: int
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class CopyTargets:
    """The arena of one plan, a target for each of its spans, and the mirrors."""

    arena: torch.Tensor
    targets: tuple[CopyTarget, ...]
    mirrors: tuple[Mirror, ...]

    @staticmethod
    def lay_out(
        arena: torch.Tensor,
        spans: Sequence[tuple[ArenaSpan, torch.device]],
        stream: Callable[[torch.device], torch.cuda.Stream],
    ) -> CopyTargets:
        """Create the targets of spans that are captured from these devices, in arena order.

        Mirrors are allocated on the capturing `stream`, so that their memory is not reused before
        their last copy.
        """
        targets: list[CopyTarget] = []
        mirrors: list[Mirror] = []
        for (small, device), run in groupby(spans, key=lambda pair: (pair[0].is_small, pair[1])):
            members = [span for span, _ in run]
            begin, end = members[0].offset, members[-1].offset + members[-1].bytes
            mirrored = small and device.type == "cuda" and len(members) > 1
            if mirrored:
                with torch.cuda.stream(stream(device)):
                    mirrors.append(Mirror(device, begin, torch.empty(end - begin, dtype=torch.uint8, device=device)))
            for span in members:
                memory, at = (mirrors[-1].memory, span.offset - begin) if mirrored else (arena, span.offset)
                targets.append(CopyTarget(memory, at, _whole(memory, at, span), mirrored))
        return CopyTargets(arena, tuple(targets), tuple(mirrors))


def _whole(memory: torch.Tensor, at: int, span: ArenaSpan) -> torch.Tensor | None:
    if (span.begin, span.end) != (0, span.held.volume):
        return None
    raw = memory[at : at + span.bytes].view(RAW_DTYPES[span.place.spec.dtype.bytes])
    return raw.view(span.held.sizes)


@dataclass(slots=True, eq=False)  # not frozen: each save makes one per tensor, and frozen ones take twice as long
class CopyItem:
    """A span of the arena, its target, and the live shard to copy; `owned` if an optimizer step guards it."""

    save_item: SaveItem
    part: ShardBox
    span: ArenaSpan
    target: CopyTarget
    owned: bool

    @property
    def device(self) -> torch.device:
        return self.save_item.holder.local.device


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Copies of one device's captured bytes to the host that are still to be started, on its side stream."""

    stream: torch.cuda.Stream
    begin: torch.cuda.Event
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def run(self) -> float:
        """Copy everything; return the milliseconds since the capture's first copy.

        About one portion is in flight at a time: a device serves a stream until it runs out of copies,
        and a loss that the trainer reads on another stream would wait for all of them.
        """
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        queued = 0
        with torch.cuda.stream(self.stream), torch.no_grad():
            for target, source in self._portions():
                target.copy_(source, non_blocking=True)
                queued += source.numel()
                if queued >= _PORTION_BYTES:
                    copied.record(self.stream)
                    copied.synchronize()
                    queued = 0
            end.record(self.stream)
        end.synchronize()
        return float(self.begin.elapsed_time(end))

    def _portions(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for target, source in self.copies:
            for at in range(0, source.numel(), _PORTION_BYTES):
                part = slice(at, at + _PORTION_BYTES)
                yield target[part], source[part]


@dataclass(slots=True)
class PendingCapture:
    """A capture in flight: its events, what is still to be copied, and the tensors that must stay alive until then."""

    bytes: int = 0
    started: float = field(default_factory=time.perf_counter)
    released: list[tuple[torch.device, torch.cuda.Event]] = field(default_factory=list)
    to_host: list[HostCopies] = field(default_factory=list)
    alive: list[torch.Tensor] = field(default_factory=list)

    def finish(self) -> float:
        """Copy what was staged on devices and wait for all copies; return the bytes per second, 0 if unknown."""
        milliseconds = sum(copies.run() for copies in self.to_host)
        self.alive.clear()
        return self.bytes / milliseconds * 1000 if milliseconds else 0.0


class Copier:
    """Starts captures; keeps the side streams and the measured speed of copies."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._staged: dict[torch.device, int] = {}
        self.rate = _FIRST_RATE

    def warm_up(self, devices: Iterable[torch.device]) -> None:
        """Create streams and load kernels, which is slow the first time."""
        for device in devices:
            if device.type == "cuda":
                with torch.cuda.stream(self.stream(device)):
                    for dtype in RAW_DTYPES.values():
                        first, second = torch.zeros((2, 8), dtype=dtype, device=device)
                        torch._foreach_copy_([first, second], [second, first])
                        first.copy_(second)

    def probe(self, device: torch.device, arena: torch.Tensor) -> None:
        """Measure the speed of copies to the arena, before it holds anything."""
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
        """Return the side stream of a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def start(self, items: Sequence[CopyItem], targets: CopyTargets, interval_s: float | None) -> PendingCapture:
        """Start to copy all items; those on the CPU are copied on return."""
        on_cpu = [item for item in items if not item.save_item.holder.local.is_cuda]
        on_cuda = [item for item in items if item.save_item.holder.local.is_cuda] if len(on_cpu) < len(items) else []
        pending = PendingCapture(bytes=sum(item.span.bytes for item in on_cuda))
        for device in sorted({item.device for item in on_cuda}, key=str):
            own = [item for item in on_cuda if item.device == device]
            self._start_device(device, own, targets, interval_s or _FIRST_INTERVAL_S, pending)
        for item in on_cpu:
            for target, source in _pairs(item, item.target):
                target.copy_(source)
        return pending

    def _start_device(
        self,
        device: torch.device,
        items: Sequence[CopyItem],
        targets: CopyTargets,
        interval_s: float,
        pending: PendingCapture,
    ) -> None:
        side = self.stream(device)
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side), torch.no_grad():
            mirrored = [item for item in items if item.target.mirrored]
            at_once = [item for item in items if not item.owned and not item.target.mirrored]
            owned = [item for item in items if item.owned and not item.target.mirrored]
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
            copies += [(mirror.begin, mirror.memory) for mirror in targets.mirrors if mirror.device == device]
            to_host = tuple((targets.arena[at : at + copy.numel()], copy) for at, copy in copies)
            pending.to_host.append(HostCopies(side, begin, to_host))

    def _gather(self, items: Iterable[CopyItem], pending: PendingCapture) -> None:
        """Copy small items into their mirrors, with few kernel launches."""
        by_width: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for item in items:
            for target, source in _pairs(item, item.target):
                own_targets, sources = by_width.setdefault(target.dtype, ([], []))
                own_targets.append(target)
                sources.append(source)
        for own_targets, sources in by_width.values():
            torch._foreach_copy_(own_targets, sources)
            pending.alive += sources

    def _copy(self, items: Iterable[CopyItem], pending: PendingCapture) -> None:
        for item in items:
            for target, source in _pairs(item, item.target):
                target.copy_(source, non_blocking=True)
                pending.alive.append(source)

    def _room(self, device: torch.device) -> int:
        """Return the free bytes of the device that the allocator has never needed, less a reserve."""
        free, total = torch.cuda.mem_get_info(device)
        spare = max(_SPARE_BYTES, int(total * _SPARE_SHARE))
        return max(self._staged.get(device, 0), free - spare, 0)

    def _buffer(self, device: torch.device, size: int) -> torch.Tensor | None:
        """Allocate a buffer on the device, or return None if it is out of memory."""
        try:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            self._staged[device] = 0
            return None
        self._staged[device] = max(size, self._staged.get(device, 0))
        return buffer

    def _stage(
        self, buffer: torch.Tensor | None, items: Sequence[CopyItem], pending: PendingCapture
    ) -> list[tuple[int, torch.Tensor]]:
        """Copy items into one buffer on the device; return each copy with its offset in the arena."""
        if buffer is None:
            return []
        pending.alive.append(buffer)
        copies = []
        at = 0
        for item in items:
            for target, source in _pairs(item, CopyTarget(buffer, at, None, mirrored=False)):
                target.copy_(source)
                pending.alive.append(source)
            copies.append((item.span.offset, buffer[at : at + item.span.bytes]))
            at += _aligned(item)
        return copies


def _aligned(item: CopyItem) -> int:
    return -(-item.span.bytes // _ALIGNMENT) * _ALIGNMENT


def _within(items: Sequence[CopyItem], room: int) -> tuple[list[CopyItem], list[CopyItem]]:
    """Return the items that fit into `room`, small ones first, and the rest."""
    inside: list[CopyItem] = []
    outside: list[CopyItem] = []
    for item in sorted(items, key=lambda item: item.span.bytes):
        room -= _aligned(item)
        (inside if room >= 0 else outside).append(item)
    return inside, outside


def _beyond(items: Sequence[CopyItem], window: int, room: int) -> list[CopyItem]:
    """Return the last items, those that exceed a copy of `window` bytes and fit into `room`."""
    excess = sum(item.span.bytes for item in items) - window
    chosen: list[CopyItem] = []
    for item in reversed(items):
        if excess <= 0 or _aligned(item) > room:
            break
        chosen.append(item)
        excess -= item.span.bytes
        room -= _aligned(item)
    return chosen


def _pairs(item: CopyItem, destination: CopyTarget) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of the destination with the live views to copy into them, as integers of the same width."""
    span, at = item.span, destination.at
    view = stored_view(item.save_item, item.part)
    width = view.element_size()
    raw = view.view(RAW_DTYPES[width])
    if destination.whole is not None:
        yield destination.whole, raw
    elif (span.begin, span.end) == (0, view.numel()):
        yield _target(destination.memory, at, raw), raw
    elif view.is_contiguous():
        part = raw.reshape(-1)[span.begin : span.end]
        yield _target(destination.memory, at, part), part
    else:
        for box in flat_boxes(tuple(view.shape), span.begin, span.end):
            part = raw[box.within(box.full(tuple(view.shape)))]
            yield _target(destination.memory, at, part), part
            at += part.numel() * width


def _target(memory: torch.Tensor, at: int, source: torch.Tensor) -> torch.Tensor:
    span = memory[at : at + source.numel() * source.element_size()]
    return span.view(source.dtype).view(source.shape)
