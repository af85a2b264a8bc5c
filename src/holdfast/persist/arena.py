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
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import StorageError
from holdfast.storage import linux
from holdfast.storage.local import LocalReader, LocalWriter

_FOLDER = Path("/dev/shm")


def create_file(size: int) -> str:
    """Reserve `size` bytes of shared memory; raises StorageError if the host has no room for them."""
    name = f"holdfast-{secrets.token_hex(16)}"
    try:
        descriptor = os.open(_FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            linux.reserve(descriptor, size)
        except OSError:
            unlink_file(name)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(
            f"reserving {size} bytes of shared memory in {_FOLDER}: {error.strerror}; "
            "give the host or container more shared memory (docker: --shm-size)"
        ) from error
    return name


def unlink_file(name: str) -> None:
    """Take the name away; the memory goes with the last process that has it open."""
    (_FOLDER / name).unlink(missing_ok=True)


def open_writer(name: str) -> LocalWriter:
    return LocalWriter(_FOLDER / name, write_back=False)


def open_reader(name: str) -> LocalReader:
    return LocalReader(_FOLDER / name)


def socket_path(name: str) -> Path:
    """Where the owner of an arena receives messages about it."""
    return _FOLDER / f"{name}.mail"


class Arena:
    """A mapped span of shared memory."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        descriptor = os.open(_FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid() or status.st_mode & 0o077 or status.st_size != size:
                raise StorageError(f"the shared memory {name} is not one that Holdfast made")
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
