"""`ObjectReader` with ranged reads and prefetching, `ObjectWriter` with uploads in parts, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.core.limits import MIB
from holdfast.storage.objects.calls import Calls, without_secrets

PART_BYTES = 16 * MIB  # stores allow 10,000 parts: files up to 160 GB
_PARTS_AT_ONCE = 4
_SMALL_BYTES = 8 * MIB  # smaller objects are put in one request, which can be retried
_PENDING_BYTES = 128 * MIB
_AHEAD_BYTES, _CHUNK_BYTES = 32 * MIB, 8 * MIB
_HEAD_BYTES = 64 * 1024


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AHEAD_BYTES // _CHUNK_BYTES, thread_name_prefix="holdfast-objects")


class ObjectReader:
    """An object of known size, read by ranges.

    With `ahead`, sequential reads prefetch the following ranges, and the first read fetches the
    header of a tensor file together with the header's length.
    """

    mappable = False

    def __init__(self, calls: Calls, key: str, size: int, *, ahead: bool = False) -> None:
        self._calls = calls
        self._key = key
        self._ahead = ahead
        self._lock = threading.Lock()
        self._next = -1
        self._streak = 0
        self._window: deque[tuple[int, int, Future[memoryview]]] = (
            deque()
        )  # begin, end and data of ranges being fetched
        self._head = memoryview(b"")
        self.size = size

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        """Read the bytes into memory, because objects cannot be mapped."""
        buffer = memoryview(bytearray(size))
        self.read_into(offset, [buffer])
        return buffer

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        targets = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        size = sum(buffer.nbytes for buffer in targets)
        if offset + size > self.size and size:
            missing = offset + size - self.size
            raise Damaged(f"{self._calls.url}/{self._key} ends at {self.size}, {missing} bytes too early")
        try:
            for buffer in targets:
                self._fill(offset, buffer)
                offset += buffer.nbytes
        except NotFound as error:
            raise Damaged(f"{error}: the object was deleted during the read") from error

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
                self._cancel_prefetch()
                buffer[:] = self._calls.read(self._key, offset, buffer.nbytes)
            self._next = offset + buffer.nbytes
            self._streak += buffer.nbytes

    def _stream(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from prefetched chunks, one after another."""
        end = offset + buffer.nbytes
        position = offset
        while position < end:
            self._prefetch(position, end)
            begin, stop, future = self._window[0]
            chunk = future.result()
            count = min(stop, end) - position
            buffer[position - offset : position - offset + count] = chunk[position - begin : position - begin + count]
            position += count
            if position == stop:
                self._window.popleft()

    def _prefetch(self, position: int, end: int) -> None:
        """Start fetching up to `end`, and as many bytes beyond as the current sequential read has covered."""
        at = self._window[-1][1] if self._window else position
        stop = min(self.size, max(end, position + min(self._streak, _AHEAD_BYTES)))
        while at < stop:
            chunk_end = min(at + _CHUNK_BYTES, stop)
            self._window.append((at, chunk_end, _pool().submit(self._calls.read, self._key, at, chunk_end - at)))
            at = chunk_end

    def _cancel_prefetch(self) -> None:
        for *_, future in self._window:
            future.cancel()
        self._window.clear()
        self._streak = 0

    def close(self) -> None:
        """Drop prefetched data."""
        with self._lock:
            self._cancel_prefetch()
            self._head = memoryview(b"")


class ObjectWriter:
    """An object of an attempt, written by one process from start to end.

    Blocks that arrive early wait in memory. The object exists, complete, when `sync` returns. A
    writer that is closed without `sync` leaves no object.
    """

    def __init__(self, calls: Calls, key: str) -> None:
        self._calls = calls
        self._key = key
        self._lock = threading.Lock()
        self._file: Any = None
        self._small: list[bytes] | None = []  # the data so far, while it fits into one small object
        self._position = 0
        self._pending: dict[int, bytes] = {}
        self._done = False
        self._failed = False

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        parts = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        with self._lock:
            if self._done or self._failed or offset < self._position:
                raise StorageError(
                    f"writing {self._where} at {offset}: bytes up to {self._position} are already written, "
                    "and cannot be written again"
                )
            if offset > self._position:
                self._hold_back(offset, b"".join(parts))
                return
            self._append(parts)
            while self._position in self._pending:
                self._append([memoryview(self._pending.pop(self._position))])

    @property
    def _where(self) -> str:
        return f"{self._calls.url}/{self._key}"

    def _hold_back(self, offset: int, data: bytes) -> None:
        if data and sum(map(len, self._pending.values())) + len(data) > _PENDING_BYTES:
            raise StorageError(f"writing {self._where}: too many later bytes arrived before those at {self._position}")
        if data:
            self._pending[offset] = data

    def _append(self, parts: Sequence[memoryview]) -> None:
        try:
            for part in parts:
                self._send(bytes(part))  # obstore keeps the buffer until it is sent, but the caller reuses it
                self._position += part.nbytes
        except Exception as error:  # noqa: BLE001  (every error is raised again, translated)
            self._failed = True
            raise self._calls.translate("writing", self._key, error) from without_secrets(error)

    def _send(self, data: bytes) -> None:
        if self._small is not None:
            self._small.append(data)
            if self._position + len(data) <= _SMALL_BYTES:
                return
            self._file = self._calls.upload(self._key, PART_BYTES, _PARTS_AT_ONCE)
            data, self._small = b"".join(self._small), None
        self._file.write(data)

    def sync(self) -> None:
        """Complete the upload. If the reply is lost, check whether the object is complete."""
        with self._lock:
            if self._done:
                return
            if self._pending or self._failed:
                raise StorageError(f"writing {self._where}: the bytes at {self._position} were never written")
            if self._small is not None:
                self._calls.put(self._key, b"".join(self._small))
                self._done = True
                return
            try:
                self._file.close()
            except Exception as error:  # noqa: BLE001  (as above)
                self._failed = True
                translated = self._calls.translate("writing", self._key, error)
                if not self._is_complete():
                    raise translated from without_secrets(error)
                self._failed = False
            self._done = True

    def _is_complete(self) -> bool:
        try:
            return self._calls.size(self._key) == self._position
        except (NotFound, StorageError):
            return False

    def close(self) -> None:
        """Abort the upload unless it was completed."""
        with self._lock:
            file, self._file = self._file, None
            self._pending.clear()
            self._small = None
            if file is None or self._done:
                return
            self._failed = True
            aborted = StorageError(f"the upload of {self._where} was aborted")
            try:
                file.__exit__(StorageError, aborted, None)  # obstore aborts on an error, else it completes the upload
            except Exception as error:  # noqa: BLE001  (as above)
                translated = self._calls.translate("aborting the upload of", self._key, error)
                if not isinstance(translated, StorageError | NotFound):
                    raise translated from without_secrets(error)
