"""What a disk holds after its power was cut: all that was flushed, and any part of what came after."""

from __future__ import annotations

import bisect
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.power.disk import ENTRY

_SECTOR = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """One write of the log, or a flush if it has no size; `data` is where its bytes are in the log."""

    offset: int
    size: int
    data: int

    @property
    def end(self) -> int:
        return self.data + self.size


def read_log(log: Path) -> list[Entry]:
    """Return every whole entry, in the order in which the disk answered."""
    entries = []
    with log.open("rb") as file:
        total = log.stat().st_size
        while (head := file.read(ENTRY.size)) and len(head) == ENTRY.size:
            offset, size = ENTRY.unpack(head)
            at = file.tell()
            if at + size > total:
                break
            entries.append(Entry(offset, size, at))
            file.seek(size, os.SEEK_CUR)
    return entries


class Cutter:
    """Makes the image of a disk whose power is cut after some entry of its log; cuts come in ascending order."""

    def __init__(self, first: Path, log: Path, entries: Sequence[Entry], folder: Path) -> None:
        self._log = os.open(log, os.O_RDONLY)
        self._entries = entries
        self._durable = folder / "durable"
        shutil.copyfile(first, self._durable)
        self._applied = 0
        self._flushes = [at for at, entry in enumerate(entries) if not entry.size]

    def cut(self, after: int, chance: random.Random, image: Path) -> str:
        """Write the image of a cut after so many entries; returns what was done, for people."""
        known = bisect.bisect_left(self._flushes, after)
        flushed = self._flushes[known - 1] if known else 0
        with self._durable.open("r+b") as file:
            for entry in self._entries[self._applied : flushed]:
                os.pwrite(file.fileno(), self._data(entry), entry.offset)
        self._applied = max(self._applied, flushed)
        shutil.copyfile(self._durable, image)
        loose = [entry for entry in self._entries[flushed:after] if entry.size]
        share = chance.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        kept = [entry for entry in loose if chance.random() < share]
        with image.open("r+b") as file:
            for entry in kept:
                os.pwrite(file.fileno(), self._torn(entry, chance), entry.offset)
        return f"{len(kept)} of {len(loose)} writes after the last flush"

    def _data(self, entry: Entry) -> bytes:
        return os.pread(self._log, entry.size, entry.data)

    def _torn(self, entry: Entry, chance: random.Random) -> bytes:
        """The bytes of a write, now and then only its first sectors."""
        data = self._data(entry)
        sectors = len(data) // _SECTOR
        if sectors > 1 and chance.random() < 0.2:
            return data[: chance.randrange(1, sectors) * _SECTOR]
        return data
