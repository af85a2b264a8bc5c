"""Holds on folders of an object store: locks on files of this host, since stores have none.

They say who works here. Processes on other hosts are seen by the notes that they write.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import NotFound, StorageError
from holdfast.core.host import host_identity
from holdfast.storage import linux


class HostHold:
    """A shared lock that ends with this process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        while True:
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            held = linux.lock(self._descriptor, alone=False)
            if held and os.fstat(self._descriptor).st_nlink:
                return
            os.close(self._descriptor)  # it was taken away by who held it last
            if not held:
                raise NotFound(f"{path.name}: it is being removed")

    def release(self) -> None:
        """Let go; the last one takes the file away."""
        if linux.lock(self._descriptor, alone=True) and os.fstat(self._descriptor).st_nlink:
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class HostHolds:
    """The holds on one root's folders, in a folder that only this user may open."""

    def __init__(self, address: str) -> None:
        self._address = address

    def take(self, folder: str) -> HostHold:
        """Hold a folder; raises NotFound while somebody removes it."""
        with self._failing(f"holding {self._address}/{folder}"):
            return HostHold(self._path(folder))

    def is_held(self, folder: str) -> bool:
        with self.alone(folder) as alone:
            return not alone

    @contextmanager
    def alone(self, folder: str) -> Iterator[bool]:
        """Keep a folder from being held for a while; whether nobody holds it now."""
        with self._failing(f"looking at {self._address}/{folder}"):
            path = self._path(folder)
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            alone = linux.lock(descriptor, alone=True)
            yield alone
            if alone and os.fstat(descriptor).st_nlink:
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    @contextmanager
    def _failing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except NotFound as error:
            raise NotFound(f"{doing}: {error}") from None
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{doing}: {error.strerror or error}") from error

    def _path(self, folder: str) -> Path:
        name = hashlib.sha256(f"{host_identity()}\n{self._address}\n{folder}".encode()).hexdigest()[:32]
        return _private_folder() / name


def _private_folder() -> Path:
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    folder = base / f"holdfast-holds-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(f"{folder} is not a private folder of this user; remove it")
    return folder
