"""A storage whose calls all pass a gate, which can count, order or fail them.

The objects that it opens (pins, readers, writers, holds) use the same gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from holdfast.storage.base import Hold, IdentifiedStorage, Pin, Reader, SharedStorage, Storage, Writer
from holdfast.storage.identity import Identity

T = TypeVar("T")
Buffers = Sequence[memoryview]


class Gate:
    """The hook of every call; this one lets all calls pass.

    `kind` is the method's name, `where` the folder and file for messages. Calls that carry bytes
    have separate methods, so that a gate can change the data written or read.
    """

    def call(self, kind: str, where: str, work: Callable[[], T]) -> T:
        return work()

    def write(self, kind: str, where: str, buffers: Buffers, work: Callable[[Buffers], None]) -> None:
        self.call(kind, where, lambda: work(buffers))

    def read_into(self, kind: str, where: str, buffers: Buffers, work: Callable[[Buffers], None]) -> None:
        self.call(kind, where, lambda: work(buffers))

    def read(self, kind: str, where: str, work: Callable[[], bytes]) -> bytes:
        return self.call(kind, where, work)


class WatchedReader:
    """A reader behind a gate. Files are never mapped, since reading a map bypasses the gate."""

    mappable = False

    def __init__(self, reader: Reader, gate: Gate, where: str) -> None:
        self._reader = reader
        self._gate = gate
        self._where = where

    @property
    def size(self) -> int:
        return self._reader.size

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        return self._gate.call("map", self._where, lambda: self._reader.map(offset, size, whole=whole))

    def read_into(self, offset: int, buffers: Buffers) -> None:
        self._gate.read_into("read_into", self._where, buffers, lambda some: self._reader.read_into(offset, some))

    def close(self) -> None:
        self._gate.call("close", self._where, self._reader.close)


class WatchedWriter:
    """A writer behind a gate."""

    def __init__(self, writer: Writer, gate: Gate, where: str) -> None:
        self._writer = writer
        self._gate = gate
        self._where = where

    def write(self, offset: int, buffers: Buffers) -> None:
        self._gate.write("write", self._where, buffers, lambda some: self._writer.write(offset, some))

    def sync(self) -> None:
        self._gate.call("sync", self._where, self._writer.sync)

    def close(self) -> None:
        self._gate.call("close", self._where, self._writer.close)


class WatchedPin:
    """A pin behind a gate."""

    def __init__(self, pin: Pin, gate: Gate, folder: str) -> None:
        self._pin = pin
        self._gate = gate
        self._folder = folder

    def files(self) -> dict[str, int]:
        return self._gate.call("files", self._folder, self._pin.files)

    def read(self, name: str, limit_bytes: int) -> bytes:
        return self._gate.read("read", f"{self._folder}/{name}", lambda: self._pin.read(name, limit_bytes))

    def open(self, name: str) -> Reader:
        where = f"{self._folder}/{name}"
        return WatchedReader(self._gate.call("open", where, lambda: self._pin.open(name)), self._gate, where)

    def hold(self) -> Hold:
        return self._gate.call("hold", self._folder, self._pin.hold)


class WatchedStorage:
    """Any storage behind a gate. Use `watched`, which keeps a shared storage shared."""

    def __init__(self, storage: Storage, gate: Gate) -> None:
        self.inner = storage
        self.gate = gate

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def whole_files(self) -> bool:
        return self.inner.whole_files

    def _call(self, kind: str, where: str, *arguments: Any, **options: Any) -> Any:
        method = getattr(self.inner, kind)
        return self.gate.call(kind, where, lambda: method(*arguments, **options))

    def pin(self, folder: str) -> Pin:
        return WatchedPin(self._call("pin", folder, folder), self.gate, folder)

    def files(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = self._call("files", folder, folder)
        return found

    def read(self, folder: str, name: str, limit_bytes: int) -> bytes:
        return self.gate.read("read", f"{folder}/{name}", lambda: self.inner.read(folder, name, limit_bytes))

    def folders(self) -> list[str]:
        found: list[str] = self._call("folders", "")
        return found

    def hidden(self) -> list[str]:
        found: list[str] = self._call("hidden", "")
        return found

    def entries(self, folder: str) -> list[str]:
        found: list[str] = self._call("entries", folder, folder)
        return found

    def begin(self, attempt: str) -> None:
        self._call("begin", attempt, attempt)

    def create(self, attempt: str, name: str, size: int) -> None:
        self._call("create", f"{attempt}/{name}", attempt, name, size)

    def writer(self, attempt: str, name: str) -> Writer:
        where = f"{attempt}/{name}"
        return WatchedWriter(self._call("writer", where, attempt, name), self.gate, where)

    def put(self, attempt: str, name: str, data: bytes) -> None:
        def work(buffers: Buffers) -> None:
            self.inner.put(attempt, name, b"".join(buffers))

        self.gate.write("put", f"{attempt}/{name}", [memoryview(data)], work)

    def take(self, attempt: str, name: str) -> Reader:
        where = f"{attempt}/{name}"
        return WatchedReader(self._call("take", where, attempt, name), self.gate, where)

    def drop(self, attempt: str, name: str) -> None:
        self._call("drop", f"{attempt}/{name}", attempt, name)

    def publish(self, attempt: str, folder: str, aside: str = "") -> None:
        self._call("publish", folder, attempt, folder, aside)

    def rename(self, folder: str, name: str, attempt: str = "") -> None:
        self._call("rename", folder, folder, name, attempt)

    def remove(self, folder: str, attempt: str = "") -> bool:
        return bool(self._call("remove", folder, folder, attempt))

    def note(self, folder: str, name: str, data: bytes, *, durable: bool = False) -> None:
        def work(buffers: Buffers) -> None:
            self.inner.note(folder, name, b"".join(buffers), durable=durable)

        self.gate.write("note", f"{folder}/{name}", [memoryview(data)], work)

    def sweep(self) -> None:
        self._call("sweep", "")

    def discard(self, attempt: str) -> None:
        self._call("discard", attempt, attempt)


class WatchedSharedStorage(WatchedStorage):
    """A shared storage behind a gate, with the address of the inner storage."""

    inner: SharedStorage

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def poll_s(self) -> float:
        return self.inner.poll_s

    def exists(self) -> bool:
        return bool(self._call("exists", ""))

    def identity(self, *, make: bool) -> Identity | None:
        """Return the identity of the inner storage, or None if it has none."""
        if not isinstance(self.inner, IdentifiedStorage):
            return None
        found: Identity | None = self._call("identity", "", make=make)
        return found

    def hold(self, folder: str) -> Hold:
        hold: Hold = self._call("hold", folder, folder)
        return hold

    def is_held(self, folder: str) -> bool:
        return bool(self._call("is_held", folder, folder))


def watched(storage: Storage, gate: Gate) -> WatchedStorage:
    """Put a storage behind a gate; a shared storage stays shared."""
    return (WatchedSharedStorage if isinstance(storage, SharedStorage) else WatchedStorage)(storage, gate)
