"""Digests of the inputs of a merge, for its record; the ranks share the files."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core import limits, names
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.threads import run_on_threads
from holdfast.format.digest import Digest

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

    def digest(self, name: str, buffer: memoryview) -> str:
        """Return the digest of one file."""
        digest = Digest()
        if name == names.MANIFEST:
            digest.update(self.source.storage.pin(self.source.folder).read(name, limits.JSON_BYTES))
            return digest.hexdigest()
        with self.lock:
            reader = self.source.open_file(name)
        try:
            for at in range(0, reader.size, _PORTION_BYTES):
                part = buffer[: min(_PORTION_BYTES, reader.size - at)]
                reader.read_into(at, [part])
                digest.update(part)
        finally:
            reader.close()
        return digest.hexdigest()


def file_digests(inputs: Sequence[DigestedFiles], ranks: Ranks, threads: int) -> list[Mapping[str, str]]:
    """Return the digests of the files of every input, by name. Collective."""
    files = [(number, name) for number, given in enumerate(inputs) for name in given.recorded]
    own = files[ranks.rank :: ranks.world]
    found: list[list[Any]] = []

    def work(tasks: Iterator[tuple[int, str]]) -> None:
        buffer = memoryview(bytearray(_PORTION_BYTES))
        for number, name in tasks:
            found.append([number, name, inputs[number].digest(name, buffer)])

    def share() -> list[list[Any]]:
        if own:
            run_on_threads(min(threads, len(own)), "holdfast-digest", own, work)
        return found

    digests: list[dict[str, str]] = [{} for _ in inputs]
    for number, name, digest in sorted(entry for answer in run_on_all_ranks(ranks, share) for entry in answer):
        digests[number][name] = digest
    return list(digests)
