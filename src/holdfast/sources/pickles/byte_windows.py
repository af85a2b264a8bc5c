"""The bytes of a pickle in order, one window of the file at a time."""

from __future__ import annotations

from holdfast.core.errors import Damaged
from holdfast.storage.base import Reader

_WINDOW_BYTES = 256 * 1024


class PickleStream:
    """The bytes of a reader from `begin` to `end`; skipped bytes are not read."""

    def __init__(self, reader: Reader, begin: int, end: int, where: str) -> None:
        self._reader = reader
        self.window = b""
        self._start = begin  # of the window in the file
        self.at = 0  # the next byte's index in the window
        self.begin = begin
        self.end = min(end, reader.size)
        self.where = where

    @property
    def position(self) -> int:
        """The file offset of the next byte."""
        return self._start + self.at

    def take(self, count: int) -> bytes:
        """Return the next bytes. Raises Damaged if there are fewer."""
        at, stop = self.at, self.at + count
        if stop > len(self.window):
            self._fill(count)
            at, stop = 0, count
        self.at = stop
        return self.window[at:stop]

    def take_line(self, limit: int) -> bytes:
        """Return the next bytes up to the end of the line, without it."""
        start = self.position
        line = bytearray()
        while True:
            if self.at >= len(self.window):
                self._fill(1)
            stop = self.window.find(b"\n", self.at)
            piece = self.window[self.at : stop if stop >= 0 else len(self.window)]
            line += piece
            self.at += len(piece) + (stop >= 0)
            if len(line) > limit:
                raise Damaged(f"{self.where}: the line at byte {start} has more than {limit} bytes")
            if stop >= 0:
                return bytes(line)

    def skip(self, count: int) -> None:
        """Skip the next bytes."""
        self.require(count)
        if self.at + count <= len(self.window):
            self.at += count
            return
        self._start, self.at, self.window = self.position + count, 0, b""

    def require(self, count: int) -> None:
        """Raise Damaged unless `count` bytes are left."""
        if count > self.end - self.position:
            raise Damaged(
                f"{self.where}: the pickle needs {count} bytes at byte {self.position}, "
                f"{max(0, self.end - self.position)} are left"
            )

    def _fill(self, count: int) -> None:
        self.require(count)
        self._start, self.at = self.position, 0
        window = bytearray(min(max(count, _WINDOW_BYTES), self.end - self._start))
        self._reader.read_into(self._start, [memoryview(window)])
        self.window = bytes(window)
