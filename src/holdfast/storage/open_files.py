"""Readers opened on demand, with a bounded number of open files: the least recently used ones are closed."""

from __future__ import annotations

import resource
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from holdfast.core.errors import HoldfastError
from holdfast.storage.base import MemoryReader, PageCacheReader, Reader

_FEWEST, _MOST = 4, 128
_SHARE = 8  # each set of open files may use one eighth of the process's descriptors

Key = TypeVar("Key", bound=Hashable)


def open_limit() -> int:
    """Return how many files one set may keep open, based on the soft limit of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(_FEWEST, min(_MOST, soft // _SHARE))


class OpenReaders(Generic[Key]):
    """Readers by name, opened on demand. The least recently used ones are closed.

    Thread-safe: a reader in use is never closed.
    """

    def __init__(self, open_reader: Callable[[Key], Reader], limit: int | None = None) -> None:
        self._open_reader = open_reader
        self._limit = limit or open_limit()
        self._lock = threading.Lock()
        self._open: OrderedDict[Key, Reader] = OrderedDict()
        self._used: Counter[Key] = Counter()

    @contextmanager
    def using(self, name: Key) -> Iterator[Reader]:
        """Yield the reader of a name. The reader stays open until the block ends."""
        with self._lock:
            reader = self._open.get(name)
            if reader is None:
                self._make_room()
                reader = self._open[name] = self._open_reader(name)
            self._open.move_to_end(name)
            self._used[name] += 1
        try:
            yield reader
        finally:
            with self._lock:
                self._used[name] -= 1

    def most_threads(self, names: Iterable[Key], threads: int, memory_bytes: int) -> int:
        """Return how many threads, at most so many, may read the first of these files that opens, within a bound.

        Readers that remember where they were, as those of object stores, serve one thread.
        """
        for name in names:
            try:
                with self.using(name) as reader:
                    if isinstance(reader, MemoryReader):
                        return max(1, min(threads, memory_bytes // max(1, reader.thread_bytes)))
                    return threads if isinstance(reader, PageCacheReader) else 1
            except (HoldfastError, OSError):  # whoever reads the file reports it
                continue
        return 1

    def _make_room(self) -> None:
        idle = [name for name in self._open if not self._used[name]]
        for name in idle[: len(self._open) - self._limit + 1]:
            self._open.pop(name).close()
            del self._used[name]

    def close(self) -> None:
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()
            self._used.clear()


class LazyReaders(Mapping[Key, Reader]):
    """Readers by key whose files are opened on demand."""

    def __init__(self, keys: Iterable[Key], open_reader: Callable[[Key], Reader]) -> None:
        self._keys = dict.fromkeys(keys)
        self._readers = OpenReaders(open_reader)

    def __getitem__(self, key: Key) -> Reader:
        if key not in self._keys:
            raise KeyError(key)
        return _LazyReader(self._readers, key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def close(self) -> None:
        self._readers.close()


class _LazyReader(Generic[Key]):
    """A reader whose file is opened for each call, unless it is still open."""

    def __init__(self, readers: OpenReaders[Key], key: Key) -> None:
        self._readers = readers
        self._key = key

    @property
    def size(self) -> int:
        with self._readers.using(self._key) as reader:
            return reader.size

    @property
    def mappable(self) -> bool:
        with self._readers.using(self._key) as reader:
            return reader.mappable

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        with self._readers.using(self._key) as reader:
            return reader.map(offset, size, whole=whole)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        with self._readers.using(self._key) as reader:
            reader.read_into(offset, buffers)

    def close(self) -> None:
        """Do nothing: `LazyReaders.close` closes all files together."""
