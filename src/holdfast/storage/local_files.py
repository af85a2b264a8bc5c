"""Local files, opened one by one: no link is followed, and every OSError becomes a StorageError."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import Damaged, HoldfastError, NotFound, StorageError
from holdfast.storage import linux
from holdfast.storage.base import Stamped
from holdfast.storage.blobs import blob_target
from holdfast.storage.stamps import is_settled, stamp_of

_CALL_BUFFERS = 512
_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


@contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Raise NotFound or StorageError, with a description of the operation, in place of an OSError."""
    try:
        yield
    except HoldfastError:
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{doing}: {error.strerror}") from error
    except OSError as error:
        hint = "; free some space or choose another root" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StorageError(f"{doing}: {error.strerror or error}{hint}") from error


class LocalReader:
    """A committed file, opened by its path or by its name in an open folder, without following links.

    With `blobs`, links of the Hugging Face cache are followed to their blobs.
    """

    def __init__(self, path: Path, *, mappable: bool = False, at: int | None = None, blobs: bool = False) -> None:
        self.path = path
        self.mappable = mappable
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with storage_errors(f"opening {path}"):
            try:
                blob = blob_target(path.name, at) if blobs and at is not None else None
                self._descriptor = os.open(blob or (path if at is None else path.name), flags, dir_fd=at)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise Damaged(f"{path} is a symbolic link, not a file") from None
                if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a device without a driver
                    raise Damaged(f"{path} is not a regular file") from None
                raise
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise Damaged(f"{path} is not a regular file")
        self.size = status.st_size

    def map(self, offset: int, size: int, *, whole: bool = False) -> memoryview:
        skip = offset % mmap.ALLOCATIONGRANULARITY
        if not size:
            return memoryview(b"")
        if offset + size > self.size:
            raise Damaged(f"{self.path} ends at {self.size}, {offset + size - self.size} bytes too early")
        with storage_errors(f"mapping {self.path} at {offset}"):
            flags = mmap.MAP_SHARED | (_MAP_POPULATE if whole else 0)
            mapped = mmap.mmap(self._descriptor, skip + size, flags, mmap.PROT_READ, offset=offset - skip)
        return memoryview(mapped)[skip:]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        waiting = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        position = offset
        with storage_errors(f"reading {self.path} at {position}"):
            while waiting:
                count = os.preadv(self._descriptor, waiting[:_CALL_BUFFERS], position)
                if count == 0:
                    missing = sum(buffer.nbytes for buffer in waiting)
                    raise Damaged(f"{self.path} ends at {position}, {missing} bytes too early")
                position += count
                waiting = _remaining(waiting, count)

    def read(self, limit_bytes: int) -> bytes:
        """Return the whole file. Raises Damaged if it exceeds the limit."""
        if self.size > limit_bytes:
            raise Damaged(f"{self.path}: {self.size} bytes, more than the limit of {limit_bytes}")
        data = bytearray(self.size)
        self.read_into(0, [memoryview(data)])
        return bytes(data)

    def stamped(self, limit_bytes: int) -> Stamped:
        """Return the whole file with its stamp. The stamp is taken before the read, so no change is missed."""
        status = os.fstat(self._descriptor)
        return Stamped(self.read(limit_bytes), stamp_of(status), is_settled(status))

    def close(self) -> None:
        os.close(self._descriptor)


def _remaining(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers that are left after `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[index + 1 :]]
        count -= buffer.nbytes
    return []


class LocalWriter:
    """A file of an attempt. Several processes may write disjoint ranges of it.

    `write_back` starts writing to disk after every `write`, so that little is left for `sync`.
    """

    def __init__(self, path: Path, *, write_back: bool = True) -> None:
        self.path = path
        self._write_back = write_back
        with storage_errors(f"opening {path} for writing"):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        waiting = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        position = offset
        with storage_errors(f"writing {self.path} at {offset}"):
            while waiting:
                count = os.pwritev(self._descriptor, waiting[:_CALL_BUFFERS], position)
                position += count
                waiting = _remaining(waiting, count)
            if self._write_back:
                linux.start_write_back(self._descriptor, offset, position - offset)

    def sync(self) -> None:
        with storage_errors(f"syncing {self.path}"):
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
