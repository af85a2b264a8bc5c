"""Holds on folders of an object store: locks on files of this host, because stores have no locks.

They show only processes of this host. Processes on other hosts are detected by their notes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from holdfast.core.errors import NotFound, StorageError
from holdfast.core.ranks import host_identity
from holdfast.storage import linux
from holdfast.storage.private import private_folders


def _folders() -> AbstractContextManager[list[int]]:
    return private_folders(f"holdfast-holds-{os.geteuid()}")


class HostHold:
    """A shared lock on a file in every private folder of this user. The lock ends with this process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._files: list[tuple[int, int]] = []  # descriptors of a folder and its locked file
        try:
            with _folders() as folders:
                for folder in folders:
                    file = _locked(folder, name)
                    self._files.append((os.dup(folder), file))
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Unlock the files. The last holder also deletes them."""
        while self._files:
            folder, file = self._files.pop()
            if linux.lock(file, exclusive=True):
                _unlink(folder, self._name, file)
            os.close(file)
            os.close(folder)


def _locked(folder: int, name: str) -> int:
    while True:
        file = _open(folder, name)
        held = linux.lock(file, exclusive=False)
        if held and os.fstat(file).st_nlink:
            return file
        os.close(file)  # deleted by its last holder in the meantime
        if not held:
            raise NotFound(f"{name}: the folder is being removed")


def _open(folder: int, name: str) -> int:
    return os.open(name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)


def _unlink(folder: int, name: str, file: int) -> None:
    if os.fstat(file).st_nlink:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


class HostHolds:
    """Holds on the folders of one root, kept in folders that only this user can open."""

    def __init__(self, address: str) -> None:
        self._address = address

    def take(self, folder: str) -> HostHold:
        """Hold a folder. Raises NotFound while another process removes it."""
        with self._storage_errors(f"holding {self._address}/{folder}"):
            return HostHold(self._file_name(folder))

    def is_held(self, folder: str) -> bool:
        with self.exclusive(folder) as is_free:
            return not is_free

    @contextmanager
    def exclusive(self, folder: str) -> Iterator[bool]:
        """Prevent new holds on a folder. Yields whether the folder is free of holds."""
        name = self._file_name(folder)
        with ExitStack() as stack:
            files: list[tuple[int, int]] = []
            with self._storage_errors(f"checking {self._address}/{folder}"):
                for place in stack.enter_context(_folders()):
                    files.append((place, _open(place, name)))
                    stack.callback(os.close, files[-1][1])
                locked = [linux.lock(file, exclusive=True) for _, file in files]  # lock all of them before deciding
            yield all(locked)
            for place, file in files if all(locked) else ():
                _unlink(place, name, file)

    @contextmanager
    def _storage_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except NotFound as error:
            raise NotFound(f"{doing}: {error}") from None
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{doing}: {error.strerror or error}") from error

    def _file_name(self, folder: str) -> str:
        return hashlib.sha256(f"{host_identity()}\n{self._address}\n{folder}".encode()).hexdigest()[:32]
