"""Arenas: memory that the processes of one host share.

An arena is a private file in the host's memory file system under a name nobody can guess.
Its space is reserved at once: a full memory file system is an error, never a SIGBUS. Bytes
that pass through once are written and read as a file, which spares both sides a page fault
for every 4 KiB; windows that are used again and again are mapped.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import StorageError
from holdfast.storage import linux
from holdfast.storage.local import LocalReader, LocalWriter

_MEMORY = Path("/dev/shm")


def create_file(size: int) -> str:
    """Reserve `size` bytes that this host's processes can share; returns the path.

    In the host's shared memory, or among its temporary files where that is too small, as
    containers often have it. Raises StorageError if there is no room in either.
    """
    name = f"holdfast-{secrets.token_hex(16)}"
    problems = []
    for folder in (_MEMORY, Path(tempfile.gettempdir())):
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
    """Take the name away; the memory goes with the last process that has it open."""
    Path(path).unlink(missing_ok=True)


def open_writer(path: str) -> LocalWriter:
    return LocalWriter(Path(path), write_back=False)


def open_reader(path: str) -> LocalReader:
    return LocalReader(Path(path))


def socket_path(path: str) -> Path:
    """Where the owner of an arena receives messages about it."""
    return Path(f"{path}.mail")


class Arena:
    """A mapped span of shared memory."""

    def __init__(self, path: str, size: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid() or status.st_mode & 0o077 or status.st_size != size:
                raise StorageError(f"the shared memory {path} is not one that Holdfast made")
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
