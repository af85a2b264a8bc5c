"""Loads into device memory: page-locked buffers, copies on side streams, scattered and converted on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from holdfast.adapters.tensors import RAW_DTYPES
from holdfast.core.limits import MIB
from holdfast.plan.files import RawArray
from holdfast.plan.staging import HostStaging, Staging, threads_and_buffer_bytes

_BUFFERS = 2  # per thread: one is read into while the other is copied
_NUMPY_DTYPES = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float16}
_LARGEST_BUFFER_BYTES = 8 * MIB  # threads that begin many small copies wait for each other


class FlatTensor:
    """A contiguous tensor on a CUDA device, filled as bytes of the stored dtype."""

    memory = None

    def __init__(self, tensor: torch.Tensor, stored: torch.dtype) -> None:
        self._item = stored.itemsize
        self._elements = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any stride
        self._stored = stored
        self._bytes: torch.Tensor | None = None
        if tensor.dtype == stored:  # copied bit for bit
            self._stored = RAW_DTYPES[self._item]
            self._elements = self._elements.view(self._stored)
            self._bytes = self._elements.view(torch.uint8)

    def write(self, at: int, pitch: int, rows: RawArray) -> None:
        count, width = rows.shape
        if count == 1:
            self._write_row(at, rows[0])
            return
        data = torch.from_numpy(rows)
        # The rows with the bytes between them make one copy; the device picks them out and converts them.
        reach = (count - 1) * data.stride(0) + width
        found = data.as_strided((reach,), (1,)).to(self._elements.device, non_blocking=True).view(self._stored)
        sizes = (count, width // self._item)
        source = found.as_strided(sizes, (data.stride(0) // self._item, 1))
        start = self._elements.storage_offset() + at // self._item
        self._elements.as_strided(sizes, (pitch // self._item, 1), start).copy_(source)

    def _write_row(self, at: int, row: RawArray) -> None:
        """Write bytes without gaps. Each call of torch lets go of the GIL, for which all threads queue: few calls."""
        width = row.size
        if self._bytes is not None:
            self._bytes[at : at + width].copy_(torch.from_numpy(row), non_blocking=True)
            return
        found = self._as_stored(row).to(self._elements.device, non_blocking=True)
        self._elements[at // self._item : (at + width) // self._item].copy_(found)

    def _as_stored(self, row: RawArray) -> torch.Tensor:
        array = _NUMPY_DTYPES.get(self._stored)
        return torch.from_numpy(row).view(self._stored) if array is None else torch.from_numpy(row.view(array))


def staging_for(devices: Collection[torch.device], memory_bytes: int, neighbors: int) -> Staging:
    """Return the buffers of a load of tensors on some devices, on a host that `neighbors` ranks share.

    The first CUDA device gets page-locked buffers; tensors on other devices are copied as they come.
    """
    cuda = next((device for device in devices if device.type == "cuda"), None)
    if cuda is None:
        staging: Staging = HostStaging.within(memory_bytes, neighbors)
    else:
        staging = DeviceStaging(cuda, *_device_buffers(memory_bytes, neighbors), memory_bytes)
    for device in _others(devices):  # threads copy to them on streams that do not wait for the program's
        torch.accelerator.synchronize(device)
    if needs_one_thread(devices):
        staging.threads = 1
    return staging


def _device_buffers(memory_bytes: int, neighbors: int) -> tuple[int, int]:
    """Return how many threads read for a GPU, and the bytes of each of their buffers."""
    return threads_and_buffer_bytes(memory_bytes, neighbors, _BUFFERS, _LARGEST_BUFFER_BYTES)


def pinned_bytes(memory_bytes: int, neighbors: int) -> int:
    """Return the page-locked memory that a load into a GPU uses on a machine with the processors of this one."""
    threads, size = _device_buffers(memory_bytes, neighbors)
    return threads * _BUFFERS * size


def needs_one_thread(devices: Collection[torch.device]) -> bool:
    """Return True if only the calling thread may fill the tensors.

    No other thread is in inference mode, without which its tensors cannot be written; and copies to
    further devices are on this thread's streams.
    """
    return bool(_others(devices)) or torch.is_inference_mode_enabled()


def _others(devices: Collection[torch.device]) -> list[torch.device]:
    cuda = next((device for device in devices if device.type == "cuda"), None)
    return [device for device in devices if device not in (cuda, torch.device("cpu"))]


class DeviceStaging:
    """Page-locked buffers and a stream for each thread. Copies wait for what the program's stream has begun."""

    def __init__(self, device: torch.device, threads: int, buffer_bytes: int, memory_bytes: int) -> None:
        self.threads, self.buffer_bytes, self.memory_bytes = threads, buffer_bytes, memory_bytes
        self._device = device
        self._begun = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def lend(self) -> Iterator[_PinnedBuffers]:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(side):
            side.wait_event(self._begun)
            try:
                yield _PinnedBuffers(self.buffer_bytes)
            finally:
                side.synchronize()


class _PinnedBuffers:
    """Page-locked buffers in turn, each with the event after its last copy."""

    def __init__(self, size: int) -> None:
        memory = torch.empty(_BUFFERS, size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._buffers: list[RawArray] = list(memory.numpy())
        self._events = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = -1

    def next(self) -> RawArray:
        self._turn = (self._turn + 1) % len(self._buffers)
        self._events[self._turn].synchronize()
        return self._buffers[self._turn]

    def sent(self) -> None:
        self._events[self._turn].record()
