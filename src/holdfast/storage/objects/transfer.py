"""Reading and writing single objects: ranged reads that run ahead, uploads in parts, both in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.core.limits import MIB
from holdfast.storage.objects.calls import Calls, without_secrets

_T = TypeVar("_T")
PART_BYTES = 16 * MIB  # stores allow 10,000 parts: files up to 160 GB
_PARTS_AT_ONCE = 4
_SMALL_BYTES = 8 * MIB  # such objects are put whole, and again if that fails
_WAITING_BYTES = 128 * MIB
_AHEAD_BYTES, _CHUNK_BYTES = 32 * MIB, 8 * MIB
_HEAD_BYTES = 64 * 1024


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AHEAD_BYTES // _CHUNK_BYTES, thread_name_prefix="holdfast-objects")


def at_once(ask: Callable[[str], _T], names: Sequence[str]) -> list[_T]:
    """The answers to small questions, a few of which are asked at the same time."""
    return list(_pool().map(ask, names))


class ObjectReader:
    """An object of known size, read by ranges.

    With `ahead`, a read that follows the one before it has the next ones fetched meanwhile,
    and the first read brings the header of a tensor file with its length.
    """

    mappable = False

    def __init__(self, calls: Calls, key: str, size: int, *, ahead: bool = False) -> None:
        self._calls = calls
        self._key = key
        self._ahead = ahead
        self._lock = threading.Lock()
        self._next = -1
        self._streak = 0
        self._window: deque[tuple[int, int, Future[memoryview]]] = deque()  # begin and end of what is on its way
        self._head = memoryview(b"")
        self.size = size

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        """The bytes, read: nothing of an object store can be mapped."""
        buffer = memoryview(bytearray(size))
        self.read_into(offset, [buffer])
        return buffer

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        waiting = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        size = sum(buffer.nbytes for buffer in waiting)
        if offset + size > self.size and size:
            missing = offset + size - self.size
            raise Damaged(f"{self._calls.url}/{self._key} ends at {self.size}, {missing} bytes too early")
        try:
            for buffer in waiting:
                self._fill(offset, buffer)
                offset += buffer.nbytes
        except NotFound as error:
            raise Damaged(f"{error}: it was deleted while it was being read") from error

    def _fill(self, offset: int, buffer: memoryview) -> None:
        if not self._ahead:
            buffer[:] = self._calls.read(self._key, offset, buffer.nbytes)
            return
        with self._lock:
            if offset + buffer.nbytes <= min(_HEAD_BYTES, self.size):
                if not self._head:
                    self._head = self._calls.read(self._key, 0, min(_HEAD_BYTES, self.size))
                buffer[:] = self._head[offset : offset + buffer.nbytes]
            elif offset == self._next:
                self._stream(offset, buffer)
            else:
                self._forget()
                buffer[:] = self._calls.read(self._key, offset, buffer.nbytes)
            self._next = offset + buffer.nbytes
            self._streak += buffer.nbytes

    def _stream(self, offset: int, buffer: memoryview) -> None:
        """Take bytes out of chunks that are fetched ahead, one after another."""
        end = offset + buffer.nbytes
        position = offset
        while position < end:
            self._fetch(position, end)
            begin, stop, future = self._window[0]
            chunk = future.result()
            count = min(stop, end) - position
            buffer[position - offset : position - offset + count] = chunk[position - begin : position - begin + count]
            position += count
            if position == stop:
                self._window.popleft()

    def _fetch(self, position: int, end: int) -> None:
        """Have what is wanted on its way, and as much ahead as was read in one go so far: it may end any time."""
        at = self._window[-1][1] if self._window else position
        stop = min(self.size, max(end, position + min(self._streak, _AHEAD_BYTES)))
        while at < stop:
            upto = min(at + _CHUNK_BYTES, stop)
            self._window.append((at, upto, _pool().submit(self._calls.read, self._key, at, upto - at)))
            at = upto

    def _forget(self) -> None:
        for *_, future in self._window:
            future.cancel()
        self._window.clear()
        self._streak = 0

    def close(self) -> None:
        """Let go of what was fetched ahead."""
        with self._lock:
            self._forget()
            self._head = memoryview(b"")


class ObjectWriter:
    """An object of an attempt, written by one process from its beginning to its end.

    Blocks that come before their turn wait in memory. The object is there when `sync` returns,
    and all of it; a writer that is closed without that leaves nothing.
    """

    def __init__(self, calls: Calls, key: str) -> None:
        self._calls = calls
        self._key = key
        self._lock = threading.Lock()
        self._file: Any = None
        self._small: list[bytes] | None = []  # what there is so far, while it may become one small object
        self._position = 0
        self._waiting: dict[int, bytes] = {}
        self._done = False
        self._failed = False

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        parts = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        with self._lock:
            if self._done or self._failed or offset < self._position:
                raise StorageError(f"writing {self._where} at {offset}: it is written up to {self._position}, and once")
            if offset > self._position:
                self._keep(offset, b"".join(parts))
                return
            self._append(parts)
            while self._position in self._waiting:
                self._append([memoryview(self._waiting.pop(self._position))])

    @property
    def _where(self) -> str:
        return f"{self._calls.url}/{self._key}"

    def _keep(self, offset: int, data: bytes) -> None:
        if data and sum(map(len, self._waiting.values())) + len(data) > _WAITING_BYTES:
            raise StorageError(
                f"writing {self._where}: the bytes at {self._position} do not come, those behind them do"
            )
        if data:
            self._waiting[offset] = data

    def _append(self, parts: Sequence[memoryview]) -> None:
        try:
            for part in parts:
                self._send(bytes(part))  # obstore keeps what it is given until it is sent; ours is used again
                self._position += part.nbytes
        except Exception as error:  # noqa: BLE001  (each is raised again, as ours)
            self._failed = True
            raise self._calls.failing("writing", self._key, error) from without_secrets(error)

    def _send(self, data: bytes) -> None:
        if self._small is not None:
            self._small.append(data)
            if self._position + len(data) <= _SMALL_BYTES:
                return
            self._file = self._calls.upload(self._key, PART_BYTES, _PARTS_AT_ONCE)
            data, self._small = b"".join(self._small), None
        self._file.write(data)

    def sync(self) -> None:
        """Complete the upload. A reply that gets lost is made up for by a look at the object."""
        with self._lock:
            if self._done:
                return
            if self._waiting or self._failed:
                raise StorageError(f"writing {self._where}: the bytes at {self._position} never came")
            if self._small is not None:
                self._calls.put(self._key, b"".join(self._small))
                self._done = True
                return
            try:
                self._file.close()
            except Exception as error:  # noqa: BLE001  (the same)
                self._failed = True
                meaning = self._calls.failing("writing", self._key, error)
                if not self._is_whole():
                    raise meaning from without_secrets(error)
                self._failed = False
            self._done = True

    def _is_whole(self) -> bool:
        try:
            return self._calls.size(self._key) == self._position
        except (NotFound, StorageError):
            return False

    def close(self) -> None:
        """Abort the upload unless it was completed."""
        with self._lock:
            file, self._file = self._file, None
            self._waiting.clear()
            self._small = None
            if file is None or self._done:
                return
            self._failed = True
            given_up = StorageError(f"{self._where} was given up")
            try:
                file.__exit__(StorageError, given_up, None)  # with an error obstore aborts, without one it completes
            except Exception as error:  # noqa: BLE001  (the same)
                meaning = self._calls.failing("aborting the upload of", self._key, error)
                if not isinstance(meaning, StorageError | NotFound):
                    raise meaning from without_secrets(error)
