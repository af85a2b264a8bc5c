"""Reads that leave the page cache alone: what the kernel has cached, and direct reads of what it has not."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import threading

from holdfast.core.limits import PAGE_BYTES

_CACHESTAT = 451  # the same number on x86-64 and ARM64
_OVERLAYFS = 0x794C7630  # its files have no pages of their own, so that cachestat finds nothing


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Cached(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("pages", "dirty", "writeback", "evicted", "recent"))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def cached_bytes(descriptor: int, offset: int, size: int) -> int | None:
    """Return how many bytes of a range are in the page cache, in whole pages; None if the kernel does not say."""
    asked, found = _Range(offset, size), _Cached()
    call = getattr(_libc(), "syscall", None)
    if call is None:
        return None
    number = ctypes.c_long(_CACHESTAT)
    if call(number, ctypes.c_int(descriptor), ctypes.byref(asked), ctypes.byref(found), ctypes.c_uint(0)):
        return None
    return int(found.pages) * os.sysconf("SC_PAGE_SIZE")


def _is_overlay(descriptor: int) -> bool:
    buffer = ctypes.create_string_buffer(512)
    if _libc().fstatfs(ctypes.c_int(descriptor), buffer):
        return True
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF == _OVERLAYFS


class UncachedFile:
    """An open file, read again past the page cache. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._refused = False

    def is_cached(self, offset: int, size: int) -> bool:
        """Return True if most of a range is cached, or if the kernel does not say."""
        if self._refused:
            return True
        cached = cached_bytes(self._descriptor, offset, size)
        return cached is None or 2 * cached >= size

    def read(self, offset: int, buffer: memoryview) -> int | None:
        """Fill the buffer past the cache and return the number of bytes that were read; None if that is not possible.

        The offset, the size and the address are multiples of a page; the end of the file may come earlier.
        """
        direct = self._open()
        if direct is None:
            return None
        try:
            position = 0
            while position < buffer.nbytes:
                count = os.preadv(direct, [buffer[position:]], offset + position)
                position += count
                if not count or position % PAGE_BYTES:  # the end of the file
                    break
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._refused = True
            return None
        return position

    def _open(self) -> int | None:
        with self._lock:
            if self._direct is None and not self._refused:
                flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
                with contextlib.suppress(OSError):  # no O_DIRECT here, or no /proc
                    if hasattr(os, "O_DIRECT") and not _is_overlay(self._descriptor):
                        self._direct = os.open(f"/proc/self/fd/{self._descriptor}", flags)
                self._refused = self._direct is None
            return self._direct

    def close(self) -> None:
        with self._lock:
            if self._direct is not None:
                os.close(self._direct)
            self._direct, self._refused = None, True
