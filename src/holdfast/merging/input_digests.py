"""Digests of the inputs of a merge, for its record, computed as the merge proceeds; the ranks share the files.

A digest needs a file's bytes in order, and threads merge them in any order. So the bytes are digested about when they
are merged, from the page cache: a disk reads them once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core import limits, names
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.threads import run_on_threads
from holdfast.format.digest import Digest, digest_hex
from holdfast.storage.base import Reader

_PORTION_BYTES = 4 * limits.MIB


@dataclass(frozen=True, slots=True)
class DigestedFiles:
    """A checkpoint, and its tensor files that a merge uses."""

    source: Checkpoint
    lock: threading.Lock
    files: tuple[str, ...]

    @property
    def recorded(self) -> tuple[str, ...]:
        """The files to digest. A manifest covers those of a Holdfast checkpoint, which are verified when read."""
        return (names.MANIFEST,) if self.source.manifest.writer else self.files


class InputDigests:
    """The digests of the files of every input. Thread-safe."""

    def __init__(self, inputs: Sequence[DigestedFiles], ranks: Ranks) -> None:
        files = [(number, name) for number, given in enumerate(inputs) for name in given.recorded]
        own = files[ranks.rank :: ranks.world]
        self._inputs = len(inputs)
        self._ranks = ranks
        self._files = [
            _FilesInOrder(given, number, [name for n, name in own if n == number])
            for number, given in enumerate(inputs)
        ]

    def advance(self, share: float) -> None:
        """Digest a share of this rank's files, from their beginning on, except where another thread is doing so."""
        for files in self._files:
            files.advance(share)

    def collect(self, threads: int) -> list[Mapping[str, str]]:
        """Digest what is left on threads; return the digests of every input's files by name. Collective."""

        def work(tasks: Iterator[_FilesInOrder]) -> None:
            for files in tasks:
                files.finish()

        def share() -> list[list[Any]]:
            run_on_threads(min(threads, self._inputs), "holdfast-digest", self._files, work)
            return [[files.number, name, digest] for files in self._files for name, digest in files.found.items()]

        digests: list[dict[str, str]] = [{} for _ in range(self._inputs)]
        answers = run_on_all_ranks(self._ranks, share)
        for number, name, digest in sorted(entry for answer in answers for entry in answer):
            digests[number][name] = digest
        return list(digests)

    def close(self) -> None:
        """Close the files. Only after a failure are some open."""
        for files in self._files:
            files.close()


class _FilesInOrder:
    """One rank's files of one input, digested one after the other, a portion at a time."""

    def __init__(self, given: DigestedFiles, number: int, files: Sequence[str]) -> None:
        self.number = number
        self.found: dict[str, str] = {}
        self._given = given
        self._waiting = list(reversed(files))
        self._total = sum(given.source.manifest.files[name].size for name in files if name != names.MANIFEST)
        self._done = 0
        self._open: tuple[str, Reader] | None = None
        self._at = 0
        self._digest = Digest()
        self._lock = threading.Lock()

    def advance(self, share: float) -> None:
        if self._lock.acquire(blocking=False):
            try:
                while self._done < self._total * share and self._portion():
                    pass
            finally:
                self._lock.release()

    def finish(self) -> None:
        with self._lock:
            while self._portion():
                pass

    def _portion(self) -> bool:
        """Digest the next bytes. Returns False if there are none."""
        if self._open is None:
            if not self._waiting:
                return False
            self._begin(self._waiting.pop())
            return True
        name, reader = self._open
        size = min(_PORTION_BYTES, reader.size - self._at)
        self._digest.update(_bytes_of(reader, self._at, size))
        self._at += size
        self._done += size
        if self._at == reader.size:
            self.found[name] = self._digest.hexdigest()
            self.close()
        return True

    def _begin(self, name: str) -> None:
        source = self._given.source
        if name == names.MANIFEST:
            self.found[name] = digest_hex(source.storage.pin(source.folder).read(name, limits.JSON_BYTES))
            return
        with self._given.lock:  # a checkpoint is not thread-safe
            self._open = name, source.open_file(name)
        self._at, self._digest = 0, Digest()

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _bytes_of(reader: Reader, offset: int, size: int) -> memoryview:
    if reader.mappable:
        return reader.map(offset, size, whole=True)
    buffer = memoryview(bytearray(size))
    reader.read_into(offset, [buffer])
    return buffer
