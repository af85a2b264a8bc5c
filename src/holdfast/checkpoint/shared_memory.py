"""Shared memory: arenas, windows and areas that the processes of one host share.

An arena is a private file in the host's memory file system under a name nobody can guess.
Its space is reserved at once: a full memory file system is an error, never a SIGBUS. Bytes
that pass through once are written and read as a file, which spares both sides a page fault
for every 4 KiB; windows that are used again and again are mapped.
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
from holdfast.storage.local import LocalReader, LocalWriter

_MEMORY = Path("/dev/shm")
_SEAL_TEXT = 64


def create_file(size: int, name: str = "", *, in_memory: bool = False) -> str:
    """Reserve `size` bytes that this host's processes can share; returns the path.

    In the host's shared memory, or among its temporary files where that is too small, as
    containers often have it, unless it must be `in_memory`. Raises StorageError if there is
    no room.
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
        f"reserving {size} bytes that ranks of this host can share: {'; '.join(problems)}; "
        "give the host or container more shared memory (docker: --shm-size)"
    )


def unlink_file(path: str) -> None:
    """Take the name away; the memory goes with the last process that has it open.

    Names in shared memory are seen by every user, and another one can put a file of their own
    under the name of a card. That file is no card, and is left where it is.
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
    """Whether a file is this user's, closed to others, and has no second name that another user may have given it."""
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.getuid()
        and not status.st_mode & 0o077
        and status.st_nlink <= 1
    )


def open_writer(path: str) -> LocalWriter:
    return LocalWriter(Path(path), write_back=False)


def open_reader(path: str) -> LocalReader:
    return LocalReader(Path(path))


def socket_path(path: str) -> Path:
    """A new place beside a window for its owner's messages; nobody can guess it and bind another socket there."""
    return Path(path).with_name(f"holdfast-mail-{secrets.token_hex(16)}")


def bind_private(receiver: socket.socket, path: Path) -> None:
    """Give a socket its path; only this user may send to it, from the first moment on."""
    os.fchmod(receiver.fileno(), 0o600)
    receiver.bind(str(path))


class Arena:
    """A mapped span of shared memory.

    With `hold`, the file is locked beside others for as long as this object or its process
    lives, which tells everyone that somebody needs it. `owner` says that this is the trainer that
    fills it, which other containers cannot tell by its process number.
    """

    def __init__(self, path: str, size: int, *, hold: bool = False, owner: bool = False, writable: bool = True) -> None:
        self.path = path
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags)
        try:
            status = os.fstat(self._descriptor)
            if not is_own(status) or status.st_size < size:
                raise StorageError(f"the shared memory {path} is not one that Holdfast made")
            if hold and not linux.lock(self._descriptor, exclusive=False):
                raise StorageError(f"the shared memory {path} is being taken away by another process")
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
        """Let go of the lock; the memory goes with the last array that looks into it."""
        if self._held:
            self._held = False
            linux.unlock(self._descriptor)
            os.close(self._descriptor)


def seal(memory: npt.NDArray[np.uint8], attempt: str) -> None:
    """Say in an arena's first page that it holds all of an attempt; "" while it is being filled."""
    text = np.frombuffer(attempt.encode().ljust(_SEAL_TEXT, b"\0"), dtype=np.uint8)
    memory[:_SEAL_TEXT] = text


def sealed_for(memory: npt.NDArray[np.uint8]) -> str:
    """The attempt that an arena holds, "" if it is being filled."""
    return memory[:_SEAL_TEXT].tobytes().rstrip(b"\0").decode(errors="replace")


def is_held(path: str) -> bool:
    """Whether a living process holds the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return not linux.lock(descriptor, exclusive=True)
    finally:
        os.close(descriptor)


def has_owner(path: str) -> bool:
    """Return whether the trainer that made an arena lives and fills it."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return linux.is_claimed(descriptor)
    finally:
        os.close(descriptor)


def find_files(prefix: str) -> list[Path]:
    """This user's private files of shared memory whose names begin so."""
    found = []
    for folder in (_MEMORY, Path(tempfile.gettempdir())):
        for path in sorted(folder.glob(f"holdfast-{prefix}*")):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue  # it went while we looked
            if is_own(status):
                found.append(path)
    return found


def read_private(path: str, limit_bytes: int) -> bytes:
    """A file that only this user can have written; raises StorageError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not is_own(status) or status.st_size > limit_bytes:
            raise StorageError(f"{path} is not a file that Holdfast made")
        return file.read()


def replace_text(path: str, text: bytes) -> None:
    """Write a private file whole or not at all."""
    unseen = f"{path}-{secrets.token_hex(8)}"
    descriptor = os.open(unseen, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        os.rename(unseen, path)
    except OSError:
        unlink_file(unseen)
        raise
