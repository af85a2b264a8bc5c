"""The identity of a root: a random id stored in a file under the root, created durably, read and checked.

A path does not identify a root. Another container may mount another volume at the same path, and
a root may be deleted and created again. The id file is created exclusively and synced. A copy of
a root carries the same id, so a local identity includes the device and inode of the id file, and
its birth time, because a file system gives the inode of a deleted file to the next one. Data kept
outside the root, such as captured states in shared memory, is looked up by both.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.storage import linux

IDENTITY = ".holdfast-root"
_ID = re.compile(r"[0-9a-f]{32}")
_LIMIT_BYTES = 4096
_LOCK_S = 5.0
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Identity:
    """A root's id, and the location of the id file: device, inode and birth time, or the address of an object store."""

    id: str
    place: str


def new_identity() -> bytes:
    """Return the contents of a new identity file with a random id."""
    return json.dumps({"holdfast": "root", "id": secrets.token_hex(16)}).encode() + b"\n"


def id_in(data: bytes) -> str | None:
    """Return the id in an identity file; None if the contents are empty, truncated or invalid."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    root_id = fields.get("id") if isinstance(fields, dict) else None
    return root_id if isinstance(root_id, str) and _ID.fullmatch(root_id) else None


def read_identity(root: Path) -> Identity | None:
    """Return the identity of a local root; None if it is missing or unreadable."""
    try:
        descriptor = os.open(root / IDENTITY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise
    try:
        status = os.fstat(descriptor)
        root_id = id_in(os.read(descriptor, _LIMIT_BYTES)) if stat.S_ISREG(status.st_mode) else None
        birth = linux.birth_time_ns(descriptor)
    finally:
        os.close(descriptor)
    return None if root_id is None else Identity(root_id, f"{status.st_dev}:{status.st_ino}:{birth}")


def make_identity(root: Path) -> Identity | None:
    """Return the identity of a local root. Create it durably if it is missing or unreadable.

    If processes race, one creates the identity and the others read it.
    """
    identity = read_identity(root)
    if identity is not None:
        return identity
    with _locked(root) as folder:
        identity = read_identity(root)
        if identity is not None:
            return identity
        _create(root, folder)
    return read_identity(root)


@contextmanager
def _locked(root: Path) -> Iterator[int]:
    """Prevent other processes from replacing an unreadable identity at the same time, where locks are supported."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + _LOCK_S
        while not linux.lock(folder, exclusive=True) and time.monotonic() < end:
            pass  # `linux.lock` sleeps between its attempts
        yield folder
    finally:
        os.close(folder)


def _create(root: Path, folder: int) -> None:
    """Write the file under a temporary name, sync it, then link it, so that no reader sees a partial file."""
    temporary = root / f"{IDENTITY}-{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(descriptor, new_identity())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _move_into_place(temporary, root / IDENTITY)
        os.fsync(folder)
    finally:
        temporary.unlink(missing_ok=True)


def _move_into_place(temporary: Path, path: Path) -> None:
    """Link the file exclusively if the name is free; otherwise replace the unreadable file."""
    if os.path.lexists(path):
        os.rename(temporary, path)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        return  # another host was faster
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(temporary, path)  # a file system without hard links; the lock excludes other processes
