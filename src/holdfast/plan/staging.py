"""Buffers of the threads that read: how many within a bound, and those in plain memory; devices bring their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from holdfast.core.limits import LOAD_MEMORY_BYTES, MIB
from holdfast.core.threads import cores
from holdfast.plan.files import RawArray, aligned_buffer

MOST_THREADS = 10  # more were slower on 16 cores
SMALLEST_BUFFER_BYTES = 2 * MIB
_BESIDE = 3  # a thread may also need a portion that it maps, and two pieces that it converts


class ThreadBuffers(Protocol):
    """The buffers of one thread, page-aligned."""

    def next(self) -> RawArray:
        """Return a buffer whose bytes no copy needs any more."""

    def sent(self) -> None:
        """Note that the copies from the buffer of the last `next` have been started."""


class Staging(Protocol):
    """The buffers through which a load's bytes pass."""

    threads: int
    buffer_bytes: int  # a thread reads so many bytes at a time
    memory_bytes: int  # the bound of all threads' buffers

    def lend(self) -> AbstractContextManager[ThreadBuffers]:
        """Lend one thread its buffers; on exit everything that it sent has arrived."""


def threads_and_buffer_bytes(memory_bytes: int, neighbors: int, buffers: int, largest_bytes: int) -> tuple[int, int]:
    """Return how many threads read, and how many bytes at a time, if each has so many buffers.

    All buffers together take at most `memory_bytes`, except that a single thread has the smallest buffers in any case.
    The processors of the host are shared with the other ranks on it, the `neighbors`.
    """
    thread_bytes = (buffers + _BESIDE) * SMALLEST_BUFFER_BYTES
    threads = max(1, min(MOST_THREADS, cores() // max(1, neighbors), memory_bytes // thread_bytes))
    size = SMALLEST_BUFFER_BYTES
    while 2 * size <= min(largest_bytes, memory_bytes // (buffers * threads)):
        size *= 2  # torch page-locks a power of two
    return threads, size


def portion_bytes_within(memory_bytes: int, neighbors: int, largest_bytes: int) -> int:
    """Return the size of portions of which every thread can have one mapped, or copied, beside its buffers."""
    threads, _ = threads_and_buffer_bytes(memory_bytes, neighbors, 1, SMALLEST_BUFFER_BYTES)
    size = SMALLEST_BUFFER_BYTES
    while 2 * size <= min(largest_bytes, memory_bytes * 3 // 4 // threads):
        size *= 2
    return size


class HostStaging:
    """One buffer of plain memory per thread. What it holds is still in the processor's cache when it is copied."""

    def __init__(self, threads: int, memory_bytes: int = LOAD_MEMORY_BYTES) -> None:
        self.threads = threads
        self.buffer_bytes = SMALLEST_BUFFER_BYTES
        self.memory_bytes = memory_bytes

    @staticmethod
    def within(memory_bytes: int, neighbors: int = 1) -> HostStaging:
        """Return buffers that take at most `memory_bytes`, beside those of the other ranks of the host."""
        threads, _ = threads_and_buffer_bytes(memory_bytes, neighbors, 1, SMALLEST_BUFFER_BYTES)
        return HostStaging(threads, memory_bytes)

    @contextmanager
    def lend(self) -> Iterator[ThreadBuffers]:
        yield _HostBuffers(self.buffer_bytes)


class _HostBuffers:
    def __init__(self, size: int) -> None:
        self._buffer = aligned_buffer(size)

    def next(self) -> RawArray:
        return self._buffer

    def sent(self) -> None:
        """Nothing is under way: copies within host memory have ended."""
