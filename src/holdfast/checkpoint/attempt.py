"""An attempt: a hidden folder whose files are written block by block and then published as a checkpoint.

Blocking saves, background saves and conversions write their bytes here, from whatever process and thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from holdfast.checkpoint.commit import BlockReport
from holdfast.core.errors import HoldfastError
from holdfast.format.digest import Digest
from holdfast.storage.base import Storage
from holdfast.storage.open_files import BlockWriters


def new_attempt() -> str:
    """Return a unique hidden folder name."""
    return f".attempt-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A hidden folder of a storage, and the folder that it becomes."""

    storage: Storage
    name: str
    folder: str

    def create(self, files: Iterable[tuple[str, int]]) -> None:
        """Create the hidden folder with its tensor files at full size."""
        self.storage.begin(self.name)
        for name, size in files:
            self.storage.create(self.name, name, size)

    def block_writer(self, files: Iterable[str]) -> BlockWriter:
        """Return a writer of blocks; `files` has the file of every block to come."""
        return BlockWriter(self, files)

    def put(self, small: Mapping[str, bytes]) -> None:
        """Write small files durably, in order."""
        for name, data in small.items():
            self.storage.put(self.name, name, data)

    def publish(self, set_aside: str = "") -> None:
        """Rename the hidden folder. A replaced folder gets the name `set_aside`, or is deleted without one."""
        self.storage.publish(self.name, self.folder, set_aside)

    def discard(self) -> None:
        self.storage.discard(self.name)


class BlockWriter:
    """Writes blocks with their digests to the files of an attempt. Thread-safe.

    A file is synced and closed after its last block.
    """

    def __init__(self, attempt: Attempt, files: Iterable[str]) -> None:
        self._writers = BlockWriters(lambda file: attempt.storage.writer(attempt.name, file), files)

    def write(self, file: str, offset: int, size: int, parts: Iterable[memoryview]) -> BlockReport:
        """Write one block from its parts in order, and return its record for the manifest.

        Each part is digested as it comes, while its bytes are in the cache. Raises HoldfastError unless the parts
        have `size` bytes.
        """
        digest, buffers, found = Digest(), [], 0
        for part in parts:
            digest.update(part)
            buffers.append(part)
            found += part.nbytes
        if found != size:
            raise HoldfastError(f"{file} at {offset}: gathered {found} of {size} bytes")
        with self._writers.block(file) as writer:
            writer.write(offset, buffers)
        return BlockReport(file, offset, size, digest.hex())

    def close(self) -> None:
        """Close the files that a failure left unfinished."""
        self._writers.close()
