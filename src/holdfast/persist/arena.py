"""Arenas: memory that the processes of one host share.

An arena is a private file in the host's memory file system under a name nobody can guess.
Its space is reserved at once: a full memory file system is an error, never a SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import StorageError
from holdfast.storage import linux

_FOLDER = Path("/dev/shm")


class Arena:
    """A span of shared memory; the creator unlinks its name once everyone has mapped it."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self._memory = memory
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)

    @staticmethod
    def create(size: int) -> Arena:
        """Reserve `size` bytes; raises StorageError if the host's shared memory has no room."""
        name = f"holdfast-{secrets.token_hex(16)}"
        path = _FOLDER / name
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                linux.reserve(descriptor, size)
                return Arena(name, mmap.mmap(descriptor, size))
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(
                f"reserving {size} bytes of shared memory in {_FOLDER}: {error.strerror}; "
                "give the host or container more shared memory (docker: --shm-size)"
            ) from error

    @staticmethod
    def attach(name: str, size: int) -> Arena:
        """Map an arena that another process of this user made."""
        try:
            descriptor = os.open(_FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if status.st_uid != os.getuid() or status.st_mode & 0o077 or status.st_size != size:
                    raise StorageError(f"the shared memory {name} is not one that Holdfast made")
                return Arena(name, mmap.mmap(descriptor, size))
            finally:
                os.close(descriptor)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"mapping shared memory {name}: {error.strerror}") from error

    def unlink(self) -> None:
        """Take the name away; the memory goes with the last process that maps it."""
        (_FOLDER / self.name).unlink(missing_ok=True)
