"""Verification of a source during its conversion: digests of used blocks, each once, on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping

from holdfast.convert.source_files import SourceCheckpoint, SourceFiles
from holdfast.convert.spans import SourceBlock
from holdfast.core.errors import Damaged
from holdfast.core.limits import MIB
from holdfast.format.digest import Digest
from holdfast.plan.load_plan import StoredBlock, StoredFile

_PORTION_BYTES = 4 * MIB


class Verifier:
    """Checks the digests of source blocks on its own thread."""

    def __init__(self, source: SourceCheckpoint, files: Iterable[StoredFile], lock: threading.Lock) -> None:
        self._source = source
        self._files: Mapping[str, StoredFile] = {file.name: file for file in files}
        self._readers = SourceFiles(source, lock)
        self._buffer = memoryview(bytearray(_PORTION_BYTES))

    def run(self, blocks: queue.SimpleQueue[SourceBlock | None], stop: threading.Event) -> None:
        """Check blocks until None is received. Raises Damaged for the first digest that does not match."""
        try:
            while not stop.is_set() and (source_block := blocks.get()) is not None:
                name, number = source_block
                block = self._files[name].blocks[number]
                if block.digest is not None:
                    self._check(name, block, stop)
        finally:
            self._readers.close()

    def _check(self, name: str, block: StoredBlock, stop: threading.Event) -> None:
        digest = Digest()
        for at in range(0, block.size, _PORTION_BYTES):
            if stop.is_set():
                return
            digest.update(self._portion(name, block.offset + at, min(_PORTION_BYTES, block.size - at)))
        if digest.hexdigest() != block.digest:
            raise Damaged(
                f"{self._source.path}/{name}: the digest of the block at {block.offset} ({block.size} bytes) is not "
                f"the one in the manifest: its bytes have changed. It holds {self._keys(name, block)}; "
                "nothing was written; `holdfast verify` names all damage"
            )

    def _portion(self, name: str, offset: int, size: int) -> memoryview:
        reader = self._readers.reader(name)
        if reader.mappable:
            return reader.map(offset, size, whole=True)
        view = self._buffer[:size]
        reader.read_into(offset, [view])
        return view

    def _keys(self, name: str, block: StoredBlock) -> str:
        end = block.offset + block.size
        keys = [place.spec.key for place in self._files[name].places if place.begin < end and block.offset < place.end]
        return ", ".join(keys[:5]) + (" ..." if len(keys) > 5 else "")
