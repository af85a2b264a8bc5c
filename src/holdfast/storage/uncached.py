"""Reads past the page cache, of what the kernel says it does not hold; and writes past it."""

from __future__ import annotations

import contextlib
import errno
import os
import threading

from holdfast.core.limits import PAGE_BYTES
from holdfast.storage import linux


class UncachedFile:
    """An open file, read or written again past the page cache. Thread-safe."""

    def __init__(self, descriptor: int, access: int = os.O_RDONLY) -> None:
        self._descriptor = descriptor
        self._access = access
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._refused = False

    def is_cached(self, offset: int, size: int) -> bool:
        """Return True if most of a range is cached, or if the kernel does not say."""
        if self._refused:
            return True
        cached = linux.cached_bytes(self._descriptor, offset, size)
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

    def write(self, offset: int, buffer: memoryview) -> bool:
        """Write the buffer past the cache; False if that is not possible, and then any part may have been written.

        The offset, the size and the address are multiples of a page.
        """
        direct = self._open()
        if direct is None:
            return False
        try:
            position = 0
            while position < buffer.nbytes:
                position += os.pwritev(direct, [buffer[position:]], offset + position)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._refused = True
            return False
        return True

    def _open(self) -> int | None:
        with self._lock:
            if self._direct is None and not self._refused:
                flags = self._access | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
                with contextlib.suppress(OSError):  # no O_DIRECT here, or no /proc
                    if hasattr(os, "O_DIRECT") and not linux.is_overlay(self._descriptor):
                        self._direct = os.open(f"/proc/self/fd/{self._descriptor}", flags)
                self._refused = self._direct is None
            return None if self._refused else self._direct

    def close(self) -> None:
        with self._lock:
            if self._direct is not None:
                os.close(self._direct)
            self._direct, self._refused = None, True
