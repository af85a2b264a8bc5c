"""The identity of a root: a random id in a file of its own, so that a root is known by more than its path.

A path says little: another container has another volume there, and a root that was deleted and
made again is another root. The id is created exclusively and synced. A copy of a root carries the
same id, so on local files the device and inode of the file belong to the identity too. Everything
that is kept outside of the root, such as captured states in shared memory, is looked up by both.
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
    """A root's id, and the place of the file that has it: device and inode, or the address of an object store."""

    id: str
    place: str


def new_identity() -> bytes:
    """Return the contents of an identity file that no other root has."""
    return json.dumps({"holdfast": "root", "id": secrets.token_hex(16)}).encode() + b"\n"


def id_in(data: bytes) -> str | None:
    """Return the id in an identity file; None if the file is empty, torn, or something else."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    found = fields.get("id") if isinstance(fields, dict) else None
    return found if isinstance(found, str) and _ID.fullmatch(found) else None


def read_identity(root: Path) -> Identity | None:
    """Return the identity of a local root, None if it has none that can be read."""
    try:
        descriptor = os.open(root / IDENTITY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise
    try:
        status = os.fstat(descriptor)
        found = id_in(os.read(descriptor, _LIMIT_BYTES)) if stat.S_ISREG(status.st_mode) else None
    finally:
        os.close(descriptor)
    return None if found is None else Identity(found, f"{status.st_dev}:{status.st_ino}")


def make_identity(root: Path) -> Identity | None:
    """Return the identity of a local root; give it one, durably, if it has none that can be read.

    Of processes that race, one makes it and the others read it.
    """
    found = read_identity(root)
    if found is not None:
        return found
    with _alone(root) as folder:
        found = read_identity(root)
        if found is not None:
            return found
        _create(root, folder)
    return read_identity(root)


@contextmanager
def _alone(root: Path) -> Iterator[int]:
    """Keep other processes from replacing an unreadable identity at the same time, where there are locks."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + _LOCK_S
        while not linux.lock(folder, alone=True) and time.monotonic() < end:
            pass  # each call waits a little by itself
        yield folder
    finally:
        os.close(folder)


def _create(root: Path, folder: int) -> None:
    """Write the file under another name, sync it, then link it: nobody ever sees half of it."""
    unseen = root / f"{IDENTITY}-{secrets.token_hex(8)}"
    descriptor = os.open(unseen, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(descriptor, new_identity())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _name(unseen, root / IDENTITY)
        os.fsync(folder)
    finally:
        unseen.unlink(missing_ok=True)


def _name(unseen: Path, path: Path) -> None:
    """Give the file its name: exclusively if the name is free, in place of what cannot be read otherwise."""
    if os.path.lexists(path):
        os.rename(unseen, path)
        return
    try:
        os.link(unseen, path)
    except FileExistsError:
        return  # another host was faster
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(unseen, path)  # a file system without links; the lock keeps others away
