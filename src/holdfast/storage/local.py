"""Local files: the commit order that survives a power loss, and reading that trusts nothing.

Order of a commit: files at full size, blocks, fsync of each file, manifest and its fsync,
fsync of the folder, rename to the committed name, fsync of the parent.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import shutil
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound, StorageError
from holdfast.core.filenames import MANIFEST, check_file, manifest_attempt
from holdfast.storage import linux
from holdfast.storage.base import Stamped
from holdfast.storage.blobs import blob_of, blob_size
from holdfast.storage.identity import Identity, make_identity, read_identity
from holdfast.storage.stamps import StampedFolders, is_settled, stamp_of
from holdfast.storage.trust import Trust, is_listed_link, unlink_if_link

_CALL_BUFFERS = 512
_REMOVED = ".removed-"  # folders whose removal was cut short, or waits for readers
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


@contextmanager
def _failing_as_storage_error(doing: str) -> Iterator[None]:
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
    """A committed file, opened without following links, by its path or by its name in an open folder.

    With `blobs`, links as the Hugging Face cache has them are followed to their blobs.
    """

    def __init__(self, path: Path, *, mappable: bool = False, at: int | None = None, blobs: bool = False) -> None:
        self.path = path
        self.mappable = mappable
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with _failing_as_storage_error(f"opening {path}"):
            try:
                blob = blob_of(path.name, at) if blobs and at is not None else None
                self._descriptor = os.open(blob or (path if at is None else path.name), flags, dir_fd=at)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise Damaged(f"{path} is a symbolic link, not a file") from None
                if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device that is not there
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
        with _failing_as_storage_error(f"mapping {self.path} at {offset}"):
            flags = mmap.MAP_SHARED | (_MAP_POPULATE if whole else 0)
            mapped = mmap.mmap(self._descriptor, skip + size, flags, mmap.PROT_READ, offset=offset - skip)
        return memoryview(mapped)[skip:]

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        waiting = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        position = offset
        with _failing_as_storage_error(f"reading {self.path} at {position}"):
            while waiting:
                count = os.preadv(self._descriptor, waiting[:_CALL_BUFFERS], position)
                if count == 0:
                    missing = sum(buffer.nbytes for buffer in waiting)
                    raise Damaged(f"{self.path} ends at {position}, {missing} bytes too early")
                position += count
                waiting = _after(waiting, count)

    def read(self, limit_bytes: int) -> bytes:
        """All of it, if it is not more than a limit."""
        if self.size > limit_bytes:
            raise Damaged(f"{self.path}: {self.size} bytes, more than the limit of {limit_bytes}")
        data = bytearray(self.size)
        self.read_into(0, [memoryview(data)])
        return bytes(data)

    def stamped(self, limit_bytes: int) -> Stamped:
        """All of it with the stamp of the open file, taken before the read: a change meanwhile is not missed."""
        status = os.fstat(self._descriptor)
        return Stamped(self.read(limit_bytes), stamp_of(status), is_settled(status))

    def close(self) -> None:
        os.close(self._descriptor)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[index + 1 :]]
        count -= buffer.nbytes
    return []


class LocalWriter:
    """A file of an attempt; several processes may write disjoint parts of it.

    `write_back` starts the disk on every write at once, so that little is left for `sync`.
    """

    def __init__(self, path: Path, *, write_back: bool = True) -> None:
        self.path = path
        self._write_back = write_back
        with _failing_as_storage_error(f"opening {path} for writing"):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        waiting = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        position = offset
        with _failing_as_storage_error(f"writing {self.path} at {offset}"):
            while waiting:
                count = os.pwritev(self._descriptor, waiting[:_CALL_BUFFERS], position)
                position += count
                waiting = _after(waiting, count)
            if self._write_back:
                linux.start_write_back(self._descriptor, offset, position - offset)

    def sync(self) -> None:
        with _failing_as_storage_error(f"syncing {self.path}"):
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class LocalHold:
    """A lock on an open folder that ends with this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._descriptor = descriptor
        try:
            with _failing_as_storage_error(f"holding {path}"):
                held = linux.lock(descriptor, alone=False)
                if not held or not os.fstat(descriptor).st_nlink:
                    raise NotFound(f"holding {path}: it is being removed")
        except HoldfastError:
            os.close(descriptor)
            raise

    def release(self) -> None:
        os.close(self._descriptor)


class LocalPin:
    """A folder kept open: its files are found in it wherever it is renamed to."""

    def __init__(self, path: Path, *, mappable: bool, blobs: bool = False) -> None:
        self._path = path
        self._mappable = mappable
        self._blobs = blobs
        with _failing_as_storage_error(f"opening {path}"):
            self._descriptor = os.open(path, _OPEN_FOLDER)
        weakref.finalize(self, os.close, self._descriptor)

    def following_blobs(self) -> LocalPin:
        """The same folder with links into the Hugging Face cache followed, as only a foreign folder may have them."""
        return LocalPin(self._path, mappable=self._mappable, blobs=True)

    def files(self) -> dict[str, int]:
        with _failing_as_storage_error(f"listing {self._path}"):
            return dict(sorted(self._files(self._descriptor, "")))

    def _files(self, folder: int, prefix: str) -> Iterator[tuple[str, int]]:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # a note that is replaced while we look
                        yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size
                elif self._blobs and entry.is_symlink():
                    size = blob_size(entry.name, folder)
                    if size is not None:
                        yield prefix + entry.name, size
                elif entry.is_dir(follow_symlinks=False) and not prefix:
                    with _opened(entry.name, folder) as inner:
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
        with _failing_as_storage_error(f"opening {path.parent}"), _opened(path.parent.name, self._descriptor) as inner:
            return LocalReader(path, mappable=self._mappable, at=inner, blobs=self._blobs)

    def hold(self) -> LocalHold:
        with _failing_as_storage_error(f"holding {self._path}"):
            descriptor = os.open(".", _OPEN_FOLDER, dir_fd=self._descriptor)
        return LocalHold(self._path, descriptor)


@contextmanager
def _opened(name: str, at: int) -> Iterator[int]:
    try:
        descriptor = os.open(name, _OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Damaged(f"{name} is a symbolic link or a file, not a folder") from None
        raise
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class LocalStorage(StampedFolders):
    """Folders under a path. Files are private to the user: 0600, folders 0700.

    Committed files are mapped where the file system is a disk or memory of this host; a
    network file system is read instead, because a map of it fails with a signal, not an error.
    """

    whole_files = False
    poll_s = 0.02

    def __init__(self, root: Path, *, mappable: bool | None = None) -> None:
        self.root = root
        self._mappable = mappable
        self._hidden_by_us: list[str] = []  # what `sweep_some` deletes

    @property
    def name(self) -> str:
        return str(self.root)

    @property
    def address(self) -> str:
        return str(self.root.absolute())

    def exists(self) -> bool:
        return self.root.is_dir()

    def identity(self, *, make: bool) -> Identity | None:
        with _failing_as_storage_error(f"identifying {self.root}"):
            if not make:
                return read_identity(self.root)
            self._make_root()
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
        with _failing_as_storage_error(f"listing {top}"):
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
        if self._mappable is None:
            self._mappable = linux.is_local_file_system(self.root)
        # A link may lead to another file system.
        mappable = self._mappable and (not path.is_symlink() or linux.is_local_file_system(path))
        return LocalPin(path, mappable=mappable)

    def requirement(self) -> Callable[[str], None]:
        """A check that raises Untrusted for a folder another user may have put here, and Damaged for a bad link.

        The root is looked at once, so that checking many folders is cheap.
        """
        with _failing_as_storage_error(f"looking at {self.root}"):
            trust = Trust.of(self.root)

        def require(folder: str) -> None:
            with _failing_as_storage_error(f"looking at {self.root / folder}"):
                trust.require(folder, MANIFEST)

        return require

    def begin(self, attempt: str) -> None:
        with _failing_as_storage_error(f"making {self.root / attempt}"):
            self._make_root()
            os.mkdir(self.root / attempt, 0o700)

    def _make_root(self) -> None:
        """Make the root and what is above it, durably: a lost parent would lose the commit."""
        missing = []
        path = self.root.absolute()
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            folder.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(folder.parent)

    def create(self, attempt: str, name: str, size: int) -> None:
        path = self._path(attempt, name)
        with _failing_as_storage_error(f"reserving {size} bytes for {path}"):
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
        return LocalWriter(self._path(attempt, name))

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
        unseen = path.with_name(f".{name}-{os.getpid()}-{threading.get_ident()}")
        with _failing_as_storage_error(f"writing {path}"):
            descriptor = os.open(unseen, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                if durable:
                    file.flush()
                    os.fsync(descriptor)
            os.rename(unseen, path)
            if durable:
                _sync_folder(path.parent)
                _sync_folder(self.root)  # the folder may be new, and is lost without its name

    def hold(self, folder: str) -> LocalHold:
        with _failing_as_storage_error(f"holding {self.root / folder}"):
            descriptor = os.open(self.root / folder, _OPEN_FOLDER | os.O_NOFOLLOW)
        return LocalHold(self.root / folder, descriptor)

    def is_held(self, folder: str) -> bool:
        with _failing_as_storage_error(f"looking at {self.root / folder}"):
            if (self.root / folder).is_symlink():
                return False  # a replaced or removed step: whoever reads its target loses nothing when the link goes
            descriptor = os.open(self.root / folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return not linux.lock(descriptor, alone=True)
            finally:
                os.close(descriptor)

    def take(self, attempt: str, name: str) -> LocalReader:
        return LocalReader(self._path(attempt, name))

    def drop(self, attempt: str, name: str) -> None:
        with _failing_as_storage_error(f"removing {self.root / attempt / name}"):
            os.unlink(self._path(attempt, name))

    def publish(self, attempt: str, folder: str, aside: str = "") -> None:
        source, target = self.root / attempt, self.root / folder
        with _failing_as_storage_error(f"publishing {target}"):
            for entry in os.scandir(source):
                if entry.is_dir(follow_symlinks=False):
                    _sync_folder(Path(entry.path))
            _sync_folder(source)
            if not os.path.lexists(target):
                self._make_certain(lambda: os.rename(source, target), lambda: os.rename(target, source))
                return
            self._make_certain(lambda: linux.exchange(source, target), lambda: linux.exchange(source, target))
        with contextlib.suppress(StorageError, NotFound):  # it is published: what is left is for the next start
            if aside:
                self.rename(attempt, aside)
            else:
                with _failing_as_storage_error(f"removing what {target} replaced"):
                    self._hidden_by_us.append(self._hide(attempt))
                    self.sweep_some()

    def _make_certain(self, change: Callable[[], None], undo: Callable[[], None]) -> None:
        """Change names under the root durably; if that fails, undo it: what was not published is not seen."""
        change()
        try:
            _sync_folder(self.root)
        except OSError:
            with contextlib.suppress(OSError):
                undo()
            raise

    def rename(self, folder: str, name: str, attempt: str = "") -> None:
        with _failing_as_storage_error(f"renaming {self.root / folder} to {name}"), self._opened(folder) as descriptor:
            if os.path.lexists(self.root / name):
                raise StorageError(f"renaming {self.root / folder} to {name}: there is such a folder")
            self._require(folder, attempt, descriptor)
            os.rename(self.root / folder, self.root / name)
            self._require_moved(folder, name, descriptor)
            _sync_folder(self.root)

    def remove(self, folder: str, attempt: str = "") -> bool:
        with _failing_as_storage_error(f"removing {self.root / folder}"), self._opened(folder) as descriptor:
            if not linux.lock(descriptor, alone=True):  # who comes to read it meanwhile is told that it goes
                return False
            self._require(folder, attempt, descriptor)
            hidden = self._hide(folder)
            self._require_moved(folder, hidden, descriptor)
            self._hidden_by_us.append(hidden)
            unlink_if_link(self.root / hidden)
        return True

    @contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        """A folder, or the one that a link leads to."""
        descriptor = os.open(self.root / folder, _OPEN_FOLDER)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _require(self, folder: str, attempt: str, descriptor: int) -> None:
        """Raise NotFound unless the open folder is what an attempt published."""
        if not attempt:
            return
        reader = LocalReader(self.root / folder / MANIFEST, at=descriptor)
        try:
            found = manifest_attempt(reader.read(limits.JSON_BYTES))
        finally:
            reader.close()
        if found != attempt:
            raise NotFound(f"{self.root / folder} is of {found or 'nobody'} now, not of {attempt}")

    def _require_moved(self, folder: str, name: str, descriptor: int) -> None:
        """Undo a rename that caught what another process has just put in the folder's place."""
        if os.stat(self.root / name).st_ino != os.fstat(descriptor).st_ino:
            os.rename(self.root / name, self.root / folder)
            raise NotFound(f"{self.root / folder} was replaced meanwhile")

    def _hide(self, folder: str) -> str:
        """Rename a folder to what nobody takes for a checkpoint."""
        hidden = f"{_REMOVED}{folder.lstrip('.')}-{secrets.token_hex(4)}"
        os.rename(self.root / folder, self.root / hidden)
        _sync_folder(self.root)
        return hidden

    def sweep(self) -> None:
        for folder in self.hidden():
            if folder.startswith(_REMOVED):
                self._sweep(folder)

    def sweep_some(self, *, left: bool = False) -> None:
        if left:
            self.sweep()
            return
        busy = []
        while self._hidden_by_us:  # another thread may add to it
            folder = self._hidden_by_us.pop(0)
            self._sweep(folder)
            if (self.root / folder).exists():  # somebody reads it
                busy.append(folder)
        self._hidden_by_us += busy

    def _sweep(self, folder: str) -> None:
        doing = _failing_as_storage_error(f"deleting {self.root / folder}")
        with contextlib.suppress(NotFound), doing:  # another may sweep too
            if unlink_if_link(self.root / folder):
                return
            with self._opened(folder) as descriptor:
                if linux.lock(descriptor, alone=True):
                    shutil.rmtree(self.root / folder)

    def discard(self, attempt: str) -> None:
        # A publish that was cut short may have left the older checkpoint under this name: before it
        # goes, it must be certain that a power loss does not bring it back to its place.
        with contextlib.suppress(OSError):  # not there, or left for `sweep`
            hidden = self.root / self._hide(attempt)
            if not unlink_if_link(hidden):
                shutil.rmtree(hidden, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, _OPEN_FOLDER)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
