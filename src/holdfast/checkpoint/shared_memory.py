"""Files of shared memory on a host: create, map, lock, seal arenas; find and read private files; window sockets.

An arena is a private file with an unguessable name in the host's memory file system. Its space
is reserved at once: a full memory file system is an error, never a SIGBUS. Bytes that pass
through once are written and read as a file, which saves both sides a page fault for every
4 KiB. Windows that are used repeatedly are mapped.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import StorageError
from holdfast.storage import linux

_MEMORY = Path("/dev/shm")
_SEAL_TEXT = 64


def create_file(size: int, name: str = "", *, in_memory: bool = False) -> str:
    """Reserve `size` bytes that the processes of this host can share; return the path.

    The file is in the host's shared memory. If that is too small, as in many containers, it is a
    temporary file, unless `in_memory` is set. Raises StorageError if there is no room.
    """
    name = f"holdfast-{name}{secrets.token_hex(16)}"
    problems = []
    for folder in (_MEMORY,) if in_memory else (_MEMORY, Path(tempfile.gettempdir())):
        path = folder / name
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                linux.reserve(descriptor, size)
            except OSError:
                path.unlink()
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
        else:
            return str(path)
    raise StorageError(
        f"cannot reserve {size} bytes to share between the ranks of this host: {'; '.join(problems)}; "
        "give the host or container more shared memory (docker: --shm-size)"
    )


def unlink_file(path: str) -> None:
    """Delete the file; the memory is freed when the last process closes it.

    Names in shared memory are visible to every user. Another user may have created a file with
    the name of a card; that file is left alone.
    """
    try:
        Path(path).unlink(missing_ok=True)
    except PermissionError:
        if _owner(path) == os.getuid():
            raise


def _owner(path: str) -> int | None:
    try:
        return os.lstat(path).st_uid
    except FileNotFoundError:
        return None


def is_own(status: os.stat_result) -> bool:
    """Return True for a regular file of this user, closed to others, without a second hard link."""
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & 0o077
        and status.st_nlink <= 1
    )


def socket_path(path: str) -> Path:
    """Return a new, unguessable socket path next to a window, for messages to its owner."""
    return Path(path).with_name(f"holdfast-mail-{secrets.token_hex(16)}")


def bind_private(receiver: socket.socket, path: Path) -> None:
    """Bind a socket to its path; only this user may ever send to it."""
    os.fchmod(receiver.fileno(), 0o600)
    receiver.bind(str(path))


class Arena:
    """A mapped file of shared memory.

    With `hold`, a shared lock on the file shows that this object or its process still needs it.
    `owner` marks the trainer that fills the arena, which other containers cannot identify by its
    process id.
    """

    def __init__(self, path: str, size: int, *, hold: bool = False, owner: bool = False, writable: bool = True) -> None:
        self.path = path
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        try:
            status = os.fstat(self._descriptor)
            if not is_own(status) or status.st_size < size:
                raise StorageError(f"the shared memory {path} was not created by Holdfast")
            if hold and not linux.lock(self._descriptor, exclusive=False):
                raise StorageError(f"the shared memory {path} is being removed by another process")
            if owner:
                linux.claim(self._descriptor)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._memory = mmap.mmap(self._descriptor, size, access=access) if size else None
        except OSError:
            os.close(self._descriptor)
            raise
        if not hold:
            os.close(self._descriptor)
        self._held = hold
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory or b"", dtype=np.uint8)

    def close(self) -> None:
        """Release the lock; the memory is freed with the last array that views it."""
        if self._held:
            self._held = False
            linux.unlock(self._descriptor)
            os.close(self._descriptor)


def seal(memory: npt.NDArray[np.uint8], attempt: str) -> None:
    """Mark an arena as holding all of an attempt, or with "" as being filled."""
    text = np.frombuffer(attempt.encode().ljust(_SEAL_TEXT, b"\0"), dtype=np.uint8)
    memory[:_SEAL_TEXT] = text


def sealed_attempt(memory: npt.NDArray[np.uint8]) -> str:
    """Return the attempt that an arena holds, "" while it is being filled."""
    return memory[:_SEAL_TEXT].tobytes().rstrip(b"\0").decode(errors="replace")


def is_held(path: str, *, once: bool = False) -> bool:
    """Return True if a living process holds the file. Asked `once`, one that only checks may be taken for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return not linux.lock(descriptor, exclusive=True, once=once)
    finally:
        os.close(descriptor)


def has_owner(path: str) -> bool:
    """Return True if the trainer that fills an arena is alive."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return linux.is_claimed(descriptor)
    finally:
        os.close(descriptor)


def find_files(prefix: str) -> list[Path]:
    """Return this user's private files of shared memory with this name prefix."""
    found = []
    for folder in (_MEMORY, Path(tempfile.gettempdir())):
        for path in sorted(folder.glob(f"holdfast-{prefix}*")):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue  # deleted during the search
            if is_own(status):
                found.append(path)
    return found


def read_private(path: str, limit_bytes: int) -> bytes:
    """Read a file that only this user can have written; raises StorageError for any other."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not is_own(status) or status.st_size > limit_bytes:
            raise StorageError(f"{path} is not a file that Holdfast created")
        return file.read()


def replace_text(path: str, text: bytes) -> None:
    """Write a private file atomically."""
    temporary = f"{path}-{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        os.rename(temporary, path)
    except OSError:
        unlink_file(temporary)
        raise
