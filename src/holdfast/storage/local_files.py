"""Local files, no links followed, OSErrors translated: readers, writers, pins, holds; blob symlinks of hub caches.

Pins keep a folder open for reading, and locks show which folders are in use. The one kind of
symlink that is followed is that of the Hugging Face cache, from a snapshot's file into `blobs`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import Damaged, HoldfastError, NotFound, StorageError
from holdfast.core.limits import PAGE_BYTES
from holdfast.core.names import check_file
from holdfast.storage import linux
from holdfast.storage.base import Stamped
from holdfast.storage.stamps import is_settled, stamp_of
from holdfast.storage.uncached import UncachedFile

_BLOB = re.compile(r"(?:\.\./){2,3}blobs/[0-9a-f]{40}(?:[0-9a-f]{24})?")
_CALL_BUFFERS = 512
_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def blob_target(name: str, folder: int) -> str | None:
    """Return the relative path of the blob that a symlink in an open folder points to; None for any other symlink."""
    try:
        target = os.readlink(name, dir_fd=folder)
    except OSError:  # not a symlink; opening the name reports any error
        return None
    return target if _BLOB.fullmatch(target) else None


def blob_size(name: str, folder: int) -> int | None:
    """Return the size of the blob that a symlink points to; None if the target is not a regular blob file."""
    target = blob_target(name, folder)
    if target is None:
        return None
    try:
        status = os.stat(target, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


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
        self._uncached = UncachedFile(self._descriptor) if mappable else None

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

    def is_cached(self, offset: int, size: int) -> bool:
        return self._uncached is None or self._uncached.is_cached(offset, size)

    def read_uncached(self, offset: int, buffer: memoryview) -> bool:
        if self._uncached is None:
            return False
        with storage_errors(f"reading {self.path} at {offset}"):
            count = self._uncached.read(offset, buffer)
        # After a short read the caller reads through the cache, which says why.
        return count is not None and offset + count >= min(offset + buffer.nbytes, self.size)

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
        if self._uncached is not None:
            self._uncached.close()
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

    `write_back` starts writing to disk after every `write`, so that little is left for `sync`. `is_local` says that the
    file is on a disk of this host, where large writes gain by going past the page cache.
    """

    def __init__(self, path: Path, *, write_back: bool = True, is_local: bool = False) -> None:
        self.path = path
        self._write_back = write_back
        with storage_errors(f"opening {path} for writing"):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._uncached = UncachedFile(self._descriptor, os.O_WRONLY) if is_local else None

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

    def write_uncached(self, offset: int, buffer: memoryview) -> bool:
        data = buffer.cast("B")
        whole = data.nbytes - data.nbytes % PAGE_BYTES
        if self._uncached is None or not whole or offset % PAGE_BYTES:
            return False
        with storage_errors(f"writing {self.path} at {offset}"):
            if not self._uncached.write(offset, data[:whole]):
                return False
        self.write(offset + whole, [data[whole:]])
        return True

    def sync(self) -> None:
        with storage_errors(f"syncing {self.path}"):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._uncached is not None:
            self._uncached.close()
        os.close(self._descriptor)


class LocalHold:
    """A shared lock on an open folder. The lock ends with this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._descriptor = descriptor
        try:
            with storage_errors(f"holding {path}"):
                held = linux.lock(descriptor, exclusive=False)
                if not held or not os.fstat(descriptor).st_nlink:
                    raise NotFound(f"holding {path}: the folder is being removed")
        except HoldfastError:
            os.close(descriptor)
            raise

    def release(self) -> None:
        os.close(self._descriptor)


class LocalPin:
    """An open folder. Its files remain readable after a rename."""

    def __init__(self, path: Path, *, mappable: bool, blobs: bool = False) -> None:
        self._path = path
        self._mappable = mappable
        self._blobs = blobs
        with storage_errors(f"opening {path}"):
            self._descriptor = os.open(path, OPEN_FOLDER)
        weakref.finalize(self, os.close, self._descriptor)

    def following_blobs(self) -> LocalPin:
        """Return a pin that follows links into the Hugging Face cache. Only foreign folders may have such links."""
        return LocalPin(self._path, mappable=self._mappable, blobs=True)

    def files(self) -> dict[str, int]:
        with storage_errors(f"listing {self._path}"):
            return dict(sorted(self._files(self._descriptor, "")))

    def _files(self, folder: int, prefix: str) -> Iterator[tuple[str, int]]:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # a note replaced during the listing
                        yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size
                elif self._blobs and entry.is_symlink():
                    size = blob_size(entry.name, folder)
                    if size is not None:
                        yield prefix + entry.name, size
                elif entry.is_dir(follow_symlinks=False) and not prefix:
                    with _open_subfolder(entry.name, folder) as inner:
                        yield from self._files(inner, f"{entry.name}/")

    def read(self, name: str, limit_bytes: int) -> bytes:
        reader = self.open(name)
        try:
            return reader.read(limit_bytes)
        finally:
            reader.close()

    def open(self, name: str) -> LocalReader:
        check_file(name, str(self._path))
        path = self._path / name
        if "/" not in name:
            return LocalReader(path, mappable=self._mappable, at=self._descriptor, blobs=self._blobs)
        with storage_errors(f"opening {path.parent}"), _open_subfolder(path.parent.name, self._descriptor) as inner:
            return LocalReader(path, mappable=self._mappable, at=inner, blobs=self._blobs)

    def hold(self) -> LocalHold:
        with storage_errors(f"holding {self._path}"):
            descriptor = os.open(".", OPEN_FOLDER, dir_fd=self._descriptor)
        return LocalHold(self._path, descriptor)


@contextmanager
def _open_subfolder(name: str, at: int) -> Iterator[int]:
    try:
        descriptor = os.open(name, OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Damaged(f"{name} is a symbolic link or a file, not a folder") from None
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, OPEN_FOLDER)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_listed_link(entry: os.DirEntry[str]) -> bool:
    """Return True if a symlink counts as a folder: a step, or a step that was replaced or removed."""
    return entry.is_symlink() and (not entry.name.startswith(".") or entry.name.startswith((".removed-", ".attempt-")))


def unlink_if_link(path: Path) -> bool:
    """Delete a symbolic link but not its target. Returns False if the path is not a link."""
    if not path.is_symlink():
        return False
    path.unlink(missing_ok=True)
    return True
