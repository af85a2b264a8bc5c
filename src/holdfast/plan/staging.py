"""Buffers of the threads that read: how many within a bound, and those in plain memory; devices bring their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from holdfast.core.limits import MIB
from holdfast.plan.files import RawArray, aligned_buffer

MOST_THREADS = 10  # more were slower on 16 cores
STEP_BYTES = 2 * MIB  # what was read is still in the processor's cache when it is digested and copied


class ThreadBuffers(Protocol):
    """The buffers of one thread, page-aligned and STEP_BYTES long."""

    def next(self) -> RawArray:
        """Return a buffer whose bytes no copy needs any more."""

    def gather(self, rows: RawArray) -> RawArray:
        """Return rows of bytes as contiguous memory from which a copy to the device can run."""

    def sent(self) -> None:
        """Note that the copies from the buffer of the last `next` have been started."""


class Staging(Protocol):
    """The buffers through which a load's bytes pass."""

    threads: int

    def lend(self) -> AbstractContextManager[ThreadBuffers]:
        """Lend one thread its buffers; on exit everything that it sent has arrived."""


def threads_within(memory_bytes: int, neighbours: int, buffers: int) -> int:
    """Return how many threads read if each has so many buffers, all within `memory_bytes`; at least one.

    The processors of the host are shared with the other ranks on it, the `neighbours`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, cores // max(1, neighbours), memory_bytes // (buffers * STEP_BYTES)))


class HostStaging:
    """One buffer of plain memory per thread."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    @contextmanager
    def lend(self) -> Iterator[ThreadBuffers]:
        yield _HostBuffers()


class _HostBuffers:
    def __init__(self) -> None:
        self._buffer = aligned_buffer(STEP_BYTES)

    def next(self) -> RawArray:
        return self._buffer

    def gather(self, rows: RawArray) -> RawArray:
        return rows

    def sent(self) -> None:
        """Nothing is under way: copies within host memory have ended."""
