"""Files of a conversion's source, opened on demand: ranges read into buffers, windows mapped without a copy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from holdfast.plan.files import RawArray
from holdfast.storage.base import Reader
from holdfast.storage.open_files import open_limit


class SourceCheckpoint(Protocol):
    """A checkpoint whose files can be opened."""

    @property
    def path(self) -> str: ...

    def open_file(self, name: str) -> Reader: ...


class SourceFiles:
    """The files of a source, with a limited number open at a time. Not thread-safe."""

    def __init__(self, source: SourceCheckpoint, lock: threading.Lock) -> None:
        self._source = source
        self._lock = lock
        self._open: OrderedDict[str, Reader] = OrderedDict()

    def reader(self, name: str) -> Reader:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        if len(self._open) >= open_limit():
            self._open.popitem(last=False)[1].close()
        with self._lock:  # a checkpoint is not thread-safe
            self._open[name] = self._source.open_file(name)
        return self._open[name]

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.reader(name).read_into(offset, buffers)

    def window(self, name: str, offset: int, size: int, *, whole: bool, buffer: RawArray | None = None) -> RawArray:
        """Return a range of a file, mapped where possible, so that unused bytes are not read; else read into `buffer`.

        `whole` announces that all bytes will be used.
        """
        reader = self.reader(name)
        if reader.mappable:
            return np.frombuffer(reader.map(offset, size, whole=whole), np.uint8)
        array = np.empty(size, np.uint8) if buffer is None else buffer[:size]
        reader.read_into(offset, [array.data])
        return array

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()
        self._open.clear()
