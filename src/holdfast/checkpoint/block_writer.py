"""The block writer: digest a block, write it to its file, and report it for the manifest.

Every save and conversion writes its blocks here, whatever process and thread they come from.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.checkpoint.commit import BlockReport
from holdfast.core.errors import HoldfastError
from holdfast.format.digest import Digest
from holdfast.storage.base import Storage
from holdfast.storage.open_files import BlockWriters


class BlockWriter:
    """Writes blocks to the files of an attempt. Thread-safe.

    `files` has the file of every block to come: a file is synced and closed after its last block.
    """

    def __init__(self, storage: Storage, attempt: str, files: Iterable[str]) -> None:
        self._writers = BlockWriters(lambda file: storage.writer(attempt, file), files)

    def write(self, file: str, offset: int, size: int, parts: Iterable[memoryview]) -> BlockReport:
        """Write one block from its parts in order; raises HoldfastError unless they have `size` bytes.

        Each part is digested as it comes, while its bytes are in the cache.
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
        """Close unfinished files. Without a failure there are none."""
        self._writers.close()
