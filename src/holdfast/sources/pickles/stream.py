"""Bytes of a pickle in their order, a window of the file at a time."""

from __future__ import annotations

from holdfast.core.errors import Damaged
from holdfast.storage.base import Reader

_WINDOW_BYTES = 256 * 1024


class Stream:
    """The bytes of a reader from `begin` to `end`; what is skipped is not read."""

    def __init__(self, reader: Reader, begin: int, end: int, where: str) -> None:
        self._reader = reader
        self._window = b""
        self._start = begin  # of the window in the file
        self._at = 0  # in the window
        self.begin = begin
        self.end = min(end, reader.size)
        self.where = where

    @property
    def position(self) -> int:
        """The offset in the file of the next byte."""
        return self._start + self._at

    def take(self, count: int) -> bytes:
        """The next bytes; raises Damaged if there are fewer."""
        at, stop = self._at, self._at + count
        if stop > len(self._window):
            self._fill(count)
            at, stop = 0, count
        self._at = stop
        return self._window[at:stop]

    def take_line(self, limit: int) -> bytes:
        """The next bytes up to a line's end, without it."""
        start = self.position
        line = bytearray()
        while True:
            if self._at >= len(self._window):
                self._fill(1)
            stop = self._window.find(b"\n", self._at)
            piece = self._window[self._at : stop if stop >= 0 else len(self._window)]
            line += piece
            self._at += len(piece) + (stop >= 0)
            if len(line) > limit:
                raise Damaged(f"{self.where}: the line at byte {start} has more than {limit} bytes")
            if stop >= 0:
                return bytes(line)

    def skip(self, count: int) -> None:
        """Go over the next bytes."""
        self.require(count)
        if self._at + count <= len(self._window):
            self._at += count
            return
        self._start, self._at, self._window = self.position + count, 0, b""

    def require(self, count: int) -> None:
        """Raise Damaged unless so many bytes are left."""
        if count > self.end - self.position:
            raise Damaged(
                f"{self.where}: the pickle needs {count} bytes at byte {self.position}, "
                f"{max(0, self.end - self.position)} are left"
            )

    def _fill(self, count: int) -> None:
        self.require(count)
        self._start, self._at = self.position, 0
        window = bytearray(min(max(count, _WINDOW_BYTES), self.end - self._start))
        self._reader.read_into(self._start, [memoryview(window)])
        self._window = bytes(window)
