"""`LocalStorage`: folders under a path; attempts, publish that survives a power loss, rename, remove, sweep.

Order of a commit: files at full size, blocks, fsync of each file, manifest and its fsync,
fsync of the folder, rename to the committed name, fsync of the parent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core import limits
from holdfast.core.errors import NotFound, StorageError
from holdfast.core.names import MANIFEST, check_file, manifest_attempt
from holdfast.storage import linux
from holdfast.storage.base import Stamped
from holdfast.storage.identity import Identity, make_identity, read_identity
from holdfast.storage.local_files import (
    OPEN_FOLDER,
    LocalHold,
    LocalPin,
    LocalReader,
    LocalWriter,
    is_listed_link,
    storage_errors,
    sync_folder,
    unlink_if_link,
)
from holdfast.storage.stamps import StampedFolders
from holdfast.storage.trust import Trust

__all__ = ["LocalHold", "LocalPin", "LocalReader", "LocalStorage", "LocalWriter"]

_REMOVED = ".removed-"  # folders whose removal was interrupted or waits for readers
_HIDDEN = re.compile(re.escape(_REMOVED) + r".*-[0-9a-f]{8}")  # as _hide names them


class LocalStorage(StampedFolders):
    """Folders under a path. Files are private to the user: mode 0600, folders 0700.

    Committed files are memory-mapped on a local disk or in memory. Files of a network file system
    are read instead, because a failing map raises a signal, not an error.
    """

    whole_files = False
    poll_s = 0.02

    def __init__(self, root: Path, *, mappable: bool | None = None) -> None:
        self.root = root
        self._mappable = mappable
        self._to_delete: list[str] = []  # removed by this process; `sweep_some` deletes them

    @property
    def name(self) -> str:
        return str(self.root)

    @property
    def address(self) -> str:
        return str(self.root.absolute())

    def exists(self) -> bool:
        return self.root.is_dir()

    def identity(self, *, make: bool) -> Identity | None:
        with storage_errors(f"identifying {self.root}"):
            if not make:
                return read_identity(self.root)
            self._create_root()
            return make_identity(self.root)

    def folders(self) -> list[str]:
        return [name for name in self._folders() if not name.startswith(".")]

    def hidden(self) -> list[str]:
        return [name for name in self._folders() if name.startswith(".")]

    def _folders(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return sorted(
                    entry.name for entry in entries if entry.is_dir(follow_symlinks=False) or is_listed_link(entry)
                )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"listing {self.root}: {error.strerror}") from error

    def files(self, folder: str) -> dict[str, int]:
        return LocalPin(self.root / folder, mappable=False).files()

    def entries(self, folder: str) -> list[str]:
        top = self.root / folder
        with storage_errors(f"listing {top}"):
            if not top.is_dir():
                return [folder] if top.exists() or top.is_symlink() else []
            return sorted(str(path.relative_to(top)) for path in top.rglob("*"))

    def read(self, folder: str, name: str, limit_bytes: int) -> bytes:
        return LocalPin(self.root / folder, mappable=False).read(name, limit_bytes)

    def read_stamped(self, folder: str, limit_bytes: int) -> Stamped:
        reader = LocalPin(self.root / folder, mappable=False).open(MANIFEST)
        try:
            return reader.stamped(limit_bytes)
        finally:
            reader.close()

    def pin(self, folder: str) -> LocalPin:
        path = self.root / folder
        # A link may point to another file system.
        mappable = self.is_local() and (not path.is_symlink() or linux.is_local_file_system(path))
        return LocalPin(path, mappable=mappable)

    def is_local(self) -> bool:
        """Return True for a disk or memory of this host, False for a network file system."""
        if self._mappable is None:
            self._mappable = linux.is_local_file_system(self.root)
        return self._mappable

    def trust_check(self) -> Callable[[str], None]:
        """Return a check that raises Untrusted for a folder of another user, and Damaged for a broken link.

        The root is inspected once, so that checking many folders is cheap.
        """
        with storage_errors(f"checking {self.root}"):
            trust = Trust.of(self.root)

        def require(folder: str) -> None:
            with storage_errors(f"checking {self.root / folder}"):
                trust.require(folder, MANIFEST)

        return require

    def begin(self, attempt: str) -> None:
        with storage_errors(f"creating the folder {self.root}"):
            self._create_root()
        with storage_errors(f"creating {self.root / attempt}"):
            os.mkdir(self.root / attempt, 0o700)

    def _create_root(self) -> None:
        """Create the root and its parents durably. A lost parent would lose the commit."""
        missing = []
        path = self.root.absolute()
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(folder.parent)
        if not self.root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def create(self, attempt: str, name: str, size: int) -> None:
        path = self._path(attempt, name)
        with storage_errors(f"reserving {size} bytes for {path}"):
            if "/" in name:
                path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                linux.reserve(descriptor, size)
            finally:
                os.close(descriptor)

    def _path(self, attempt: str, name: str) -> Path:
        check_file(name, self.name)
        return self.root / attempt / name

    def writer(self, attempt: str, name: str) -> LocalWriter:
        return LocalWriter(self._path(attempt, name), is_local=self.is_local())

    def put(self, attempt: str, name: str, data: bytes) -> None:
        self.create(attempt, name, 0)
        writer = self.writer(attempt, name)
        try:
            writer.write(0, [memoryview(data)])
            writer.sync()
        finally:
            writer.close()

    def note(self, folder: str, name: str, data: bytes, *, durable: bool = False) -> None:
        path = self._path(folder, name)
        temporary = path.with_name(f".{name}-{os.getpid()}-{threading.get_ident()}")
        with storage_errors(f"writing {path}"):
            descriptor = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(descriptor)
            os.rename(temporary, path)
            if durable:
                sync_folder(path.parent)
                sync_folder(self.root)  # the folder may be new, and a power loss may lose its name

    def hold(self, folder: str) -> LocalHold:
        with storage_errors(f"holding {self.root / folder}"):
            descriptor = os.open(self.root / folder, OPEN_FOLDER | os.O_NOFOLLOW)
        return LocalHold(self.root / folder, descriptor)

    def is_held(self, folder: str) -> bool:
        with storage_errors(f"checking {self.root / folder}"):
            if (self.root / folder).is_symlink():
                return False  # a replaced or removed step: deleting the link does not affect readers of its target
            descriptor = os.open(self.root / folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return not linux.lock(descriptor, exclusive=True)
            finally:
                os.close(descriptor)

    def take(self, attempt: str, name: str) -> LocalReader:
        return LocalReader(self._path(attempt, name))

    def drop(self, attempt: str, name: str) -> None:
        with storage_errors(f"deleting {self.root / attempt / name}"):
            os.unlink(self._path(attempt, name))

    def publish(self, attempt: str, folder: str, aside: str = "") -> None:
        source, target = self.root / attempt, self.root / folder
        with storage_errors(f"publishing {target}"):
            for entry in os.scandir(source):
                if entry.is_dir(follow_symlinks=False):
                    sync_folder(Path(entry.path))
            sync_folder(source)
            if not os.path.lexists(target):
                self._change_durably(lambda: os.rename(source, target), lambda: os.rename(target, source))
                return
            self._change_durably(lambda: linux.exchange(source, target), lambda: linux.exchange(source, target))
        with contextlib.suppress(StorageError, NotFound):  # already published; the next start cleans up the rest
            if aside:
                self.rename(attempt, aside)
            else:
                with storage_errors(f"deleting the folder replaced by {target}"):
                    self._to_delete.append(self._hide(attempt))
                    self.sweep_some()

    def _change_durably(self, change: Callable[[], None], undo: Callable[[], None]) -> None:
        """Change names under the root durably. If that fails, undo the change, so that no reader sees it."""
        change()
        try:
            sync_folder(self.root)
        except OSError:
            with contextlib.suppress(OSError):
                undo()
            raise

    def rename(self, folder: str, name: str, attempt: str = "") -> None:
        with storage_errors(f"renaming {self.root / folder} to {name}"), self._opened(folder) as descriptor:
            if os.path.lexists(self.root / name):
                raise StorageError(f"renaming {self.root / folder} to {name}: a folder of that name already exists")
            self._check_attempt(folder, attempt, descriptor)
            os.rename(self.root / folder, self.root / name)
            self._check_same_folder(folder, name, descriptor)
            sync_folder(self.root)

    def remove(self, folder: str, attempt: str = "") -> bool:
        with storage_errors(f"removing {self.root / folder}"), self._opened(folder) as descriptor:
            if not linux.lock(descriptor, exclusive=True):  # new readers now get NotFound
                return False
            self._check_attempt(folder, attempt, descriptor)
            hidden = self._hide(folder)
            self._check_same_folder(folder, hidden, descriptor)
            self._to_delete.append(hidden)
            unlink_if_link(self.root / hidden)
        return True

    @contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        """Open a folder, or the target of a link."""
        descriptor = os.open(self.root / folder, OPEN_FOLDER)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _check_attempt(self, folder: str, attempt: str, descriptor: int) -> None:
        """Raise NotFound unless the open folder was published by an attempt."""
        if not attempt:
            return
        reader = LocalReader(self.root / folder / MANIFEST, at=descriptor)
        try:
            actual = manifest_attempt(reader.read(limits.JSON_BYTES))
        finally:
            reader.close()
        if actual != attempt:
            raise NotFound(f"{self.root / folder} was published by {actual or 'an unknown attempt'}, not by {attempt}")

    def _check_same_folder(self, folder: str, name: str, descriptor: int) -> None:
        """Undo a rename if another process replaced the folder just before. Raises NotFound then."""
        if os.stat(self.root / name).st_ino != os.fstat(descriptor).st_ino:
            os.rename(self.root / name, self.root / folder)
            raise NotFound(f"{self.root / folder} was replaced by another process")

    def _hide(self, folder: str) -> str:
        """Rename a folder so that no reader takes it for a checkpoint."""
        hidden = f"{_REMOVED}{folder.lstrip('.')}-{secrets.token_hex(4)}"
        os.rename(self.root / folder, self.root / hidden)
        sync_folder(self.root)
        return hidden

    def sweep(self) -> None:
        for folder in self.hidden():
            if _HIDDEN.fullmatch(folder):
                self._sweep(folder)

    def sweep_some(self, *, left: bool = False) -> None:
        if left:
            self.sweep()
            return
        busy = []
        while self._to_delete:  # another thread may append
            folder = self._to_delete.pop(0)
            self._sweep(folder)
            if (self.root / folder).exists():  # it has readers
                busy.append(folder)
        self._to_delete += busy

    def _sweep(self, folder: str) -> None:
        doing = storage_errors(f"deleting {self.root / folder}")
        with contextlib.suppress(NotFound), doing:  # another process may be sweeping
            if unlink_if_link(self.root / folder):
                return
            with self._opened(folder) as descriptor:
                if linux.lock(descriptor, exclusive=True):
                    shutil.rmtree(self.root / folder)

    def discard(self, attempt: str) -> None:
        # An interrupted publish may have left the replaced checkpoint under this name. The rename is
        # synced before the deletion, so that a power loss cannot restore a half-deleted checkpoint.
        with contextlib.suppress(OSError):  # missing, or left for `sweep`
            hidden = self.root / self._hide(attempt)
            if not unlink_if_link(hidden):
                shutil.rmtree(hidden, ignore_errors=True)
