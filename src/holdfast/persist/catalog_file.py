"""The catalogue file: summaries of manifests from process to process, kept for speed alone.

Every entry has the stamp of the manifest it was made from; an entry whose stamp differs from
the manifest's own counts as absent. So does a file that is torn, stale or unreadable. It is never
synced, may be deleted at any time, and is made again from the manifests.

There are two files: `base.json` with most entries, and `tail.json` with those that came since,
so that a save writes a few entries and not all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import HoldfastError
from holdfast.format.digest import HEX_DIGITS, digest_hex
from holdfast.format.summary import Summary
from holdfast.storage.base import Storage

FOLDER, BASE, TAIL = ".catalog", "base.json", "tail.json"
WORTH = 10  # with fewer steps than that their manifests are read as fast
_TAIL_ENTRIES = 64
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder with the stamp and digest of its manifest, whether the stamp is settled, and the summary."""

    folder: str
    stamp: str
    digest: str
    settled: bool
    summary: Summary

    def text(self) -> str:
        fields = [self.folder, self.stamp, self.digest, self.settled, self.summary.fields()]
        return json.dumps(fields, separators=(",", ":"))

    @staticmethod
    def from_fields(fields: Any) -> Entry:
        folder, stamp, digest, settled, summary = fields
        if not all(type(text) is str for text in (folder, stamp, digest)) or type(settled) is not bool:
            raise TypeError("not an entry of a catalogue")
        return Entry(folder, stamp, digest, settled, Summary.from_fields(summary))


class CatalogFile:
    """The catalogue file of one root."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._tail: dict[str, str] | None = None  # texts of entries by folder; None: a base has to be written
        self._made = False

    def read(self) -> list[Entry]:
        """Return the entries of the file; none of a part that cannot be read."""
        tail = self._entries(TAIL)
        base = self._entries(BASE)
        if base is not None and tail is not None and len(tail) <= _TAIL_ENTRIES:
            self._tail = {entry.folder: entry.text() for entry in tail}
            self._made = True
        newer = {entry.folder for entry in tail or ()}
        return [*(entry for entry in base or () if entry.folder not in newer), *(tail or ())]

    def _entries(self, name: str) -> list[Entry] | None:
        try:
            data = self._storage.read(FOLDER, name, limits.JSON_BYTES)
            return [Entry.from_fields(fields) for fields in _checked(data)]
        except (HoldfastError, OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def write(self, changed: Mapping[str, Entry | None], everything: Callable[[], list[Entry]]) -> None:
        """Write the changed entries, or everything where the tail has grown long or there is no base yet."""
        if self._tail is not None and not changed:
            return
        try:
            if self._tail is None or len(self._tail) + len(changed) > _TAIL_ENTRIES:
                self._write_base(everything())
            else:
                for folder, entry in changed.items():
                    self._tail.pop(folder, None)
                    if entry is not None:
                        self._tail[folder] = entry.text()
                self._note(TAIL, self._tail.values())
        except (HoldfastError, OSError):
            self._tail, self._made = None, False  # a read-only root, a full disk: the next process reads the manifests

    def _write_base(self, entries: list[Entry]) -> None:
        if len(entries) < WORTH and not self._made:
            return
        self._tail = None
        if not self._made and FOLDER not in self._storage.hidden():
            self._storage.begin(FOLDER)
        self._made = True
        self._note(BASE, [entry.text() for entry in entries])
        self._note(TAIL, [])
        self._tail = {}

    def _note(self, name: str, texts: Any) -> None:
        body = f'{{"version":{_VERSION},"entries":[{",".join(texts)}]}}'.encode()
        self._storage.note(FOLDER, name, digest_hex(body).encode() + b"\n" + body)


def _checked(data: bytes) -> Any:
    """The entries in a file whose digest is right; raises ValueError for any other."""
    digest, body = data[:HEX_DIGITS], memoryview(data)[HEX_DIGITS + 1 :]
    if digest_hex(body).encode() != digest:
        raise ValueError("torn")
    fields = json.loads(bytes(body))
    if fields["version"] != _VERSION:
        raise ValueError("another version")
    return fields["entries"]
