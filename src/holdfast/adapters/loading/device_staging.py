"""Loads into device memory: page-locked buffers, copies on side streams, conversion of dtypes on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from holdfast.plan.files import RawArray
from holdfast.plan.staging import STEP_BYTES, HostStaging, Staging, threads_within

BUFFERS = 4  # per thread: two to read into, and for each one to gather rows in


class FlatTensor:
    """A contiguous tensor on a CUDA device, filled as bytes of the stored dtype."""

    memory = None

    def __init__(self, tensor: torch.Tensor, stored: torch.dtype) -> None:
        self._casts = tensor.dtype != stored
        self._stored = stored
        self._item = stored.itemsize
        flat = tensor.reshape(-1)
        self._flat = flat if self._casts else flat.view(torch.uint8)

    def write(self, at: int, pitch: int, rows: RawArray) -> None:
        count, width = rows.shape
        data = torch.from_numpy(rows.reshape(-1))
        if not self._casts and (count == 1 or pitch == width):
            self._flat[at : at + data.numel()].copy_(data, non_blocking=True)
            return
        data = data.to(self._flat.device, non_blocking=True)
        if self._casts:
            data, at, pitch, width = data.view(self._stored), at // self._item, pitch // self._item, width // self._item
        self._flat.as_strided((count, width), (pitch, 1), self._flat.storage_offset() + at).copy_(
            data.view(count, width)
        )


def staging_for(device: torch.device | None, memory_bytes: int, neighbours: int) -> Staging:
    """Return the buffers of a load of tensors on `device`, or on none, beside the other ranks of the host."""
    threads = threads_within(memory_bytes, neighbours, 1 if device is None else BUFFERS)
    if torch.is_inference_mode_enabled():  # a mode of this thread, without which its tensors cannot be written
        threads = 1
    return HostStaging(threads) if device is None else DeviceStaging(device, threads)


class DeviceStaging:
    """Page-locked buffers and a stream for each thread. Copies wait for what the program's stream has begun."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self.threads = threads
        self._device = device
        self._begun = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def lend(self) -> Iterator[_PinnedBuffers]:
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
            stream = torch.cuda.current_stream()
            stream.wait_event(self._begun)
            try:
                yield _PinnedBuffers()
            finally:
                stream.synchronize()


class _PinnedBuffers:
    """Two buffers in turn, with room beside each to gather rows in: one is read into while the other is copied."""

    def __init__(self) -> None:
        memory = torch.empty(BUFFERS // 2, 2 * STEP_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._halves: list[RawArray] = list(memory.numpy())
        self._events = [torch.cuda.Event() for _ in self._halves]  # type: ignore[no-untyped-call]
        self._turn = -1
        self._gathered = 0

    def next(self) -> RawArray:
        self._turn = (self._turn + 1) % len(self._halves)
        self._events[self._turn].synchronize()
        self._gathered = STEP_BYTES
        return self._halves[self._turn][:STEP_BYTES]

    def gather(self, rows: RawArray) -> RawArray:
        if rows.flags.c_contiguous:
            return rows
        end = self._gathered + rows.size
        if end > 2 * STEP_BYTES:  # several destinations take the same rows: ordinary memory, copied at once
            return np.ascontiguousarray(rows)
        out = self._halves[self._turn][self._gathered : end].reshape(rows.shape)
        out[...] = rows
        self._gathered = end
        return out

    def sent(self) -> None:
        self._events[self._turn].record()
