"""Local folders, kept open: pins for reading, and locks that show which folders are in use."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import Damaged, HoldfastError, NotFound
from holdfast.core.filenames import check_file
from holdfast.storage import linux
from holdfast.storage.blobs import blob_size
from holdfast.storage.local_files import LocalReader, storage_errors

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


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
