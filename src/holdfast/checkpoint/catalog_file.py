"""The catalog file: manifest summaries in base.json and tail.json, kept across processes only for speed.

Every entry has the stamp of its manifest. An entry whose stamp differs from the manifest's
current stamp counts as absent. So does a torn, stale or unreadable file. The file is never
synced, may be deleted at any time, and is rebuilt from the manifests.

There are two files: `base.json` with most entries, and `tail.json` with the recent ones, so that
a save writes a few entries instead of all. Values that many steps share, such as the mesh and the
steps abandoned by a rewind, are stored once per file, in a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import HoldfastError
from holdfast.format.digest import HEX_DIGITS, digest_hex
from holdfast.format.summary import ManifestSummary
from holdfast.storage import trust_check
from holdfast.storage.base import Storage

FOLDER, BASE, TAIL = ".catalog", "base.json", "tail.json"
WORTH = 10  # with fewer steps, reading the manifests is as fast
_TAIL_ENTRIES = 64
_VERSION = 3
_TIMES = ("seconds", "stall_ms")  # the fields of a writer that differ between steps


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder with the stamp and digest of its manifest, its summary, and whether the stamp is settled."""

    folder: str
    stamp: str
    digest: str
    settled: bool
    summary: ManifestSummary


class CatalogFile:
    """The catalog file of one root."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._tail: dict[str, Entry] | None = None  # None: the base must be written
        self._made = False

    def read(self) -> list[Entry]:
        """Return the entries of the file, without the parts that cannot be read."""
        base = self._entries(BASE)
        tail = None if base is None else self._entries(TAIL)
        if base is not None and tail is not None and len(tail) <= _TAIL_ENTRIES:
            self._tail = {entry.folder: entry for entry in tail}
            self._made = True
        newer = {entry.folder for entry in tail or ()}
        return [*(entry for entry in base or () if entry.folder not in newer), *(tail or ())]

    def _entries(self, name: str) -> list[Entry] | None:
        try:
            trust_check(self._storage)(FOLDER)  # another user might have created it in a shared root
            return _decode(self._storage.read(FOLDER, name, limits.JSON_BYTES))
        except (HoldfastError, OSError, ValueError, TypeError, LookupError, RecursionError):
            return None

    def write(self, changed: Mapping[str, Entry | None], everything: Callable[[], list[Entry]]) -> None:
        """Write the changed entries, or everything if the tail is long or there is no base yet."""
        if self._tail is not None and not changed:
            return
        try:
            if self._tail is None or len(self._tail) + len(changed) > _TAIL_ENTRIES:
                self._write_base(everything())
            else:
                for folder, entry in changed.items():
                    self._tail.pop(folder, None)
                    if entry is not None:
                        self._tail[folder] = entry
                self._note(TAIL, self._tail.values())
        except (HoldfastError, OSError):
            self._tail, self._made = None, False  # a read-only root or full disk: the next process reads manifests

    def _write_base(self, entries: list[Entry]) -> None:
        if len(entries) < WORTH and not self._made:
            return
        self._tail = None
        if not self._made and FOLDER not in self._storage.hidden():
            self._storage.begin(FOLDER)
        self._made = True
        self._note(BASE, entries)
        self._note(TAIL, [])
        self._tail = {}

    def _note(self, name: str, entries: Iterable[Entry]) -> None:
        self._storage.note(FOLDER, name, _encode(entries))


def _encode(entries: Iterable[Entry]) -> bytes:
    """Encode a digest, and JSON with a table and the entries that refer to it."""
    table: dict[str, int] = {}

    def number(value: Any) -> int:
        return table.setdefault(json.dumps(value, separators=(",", ":")), len(table))

    rows = []
    for entry in entries:
        summary = entry.summary
        writer = {name: value for name, value in summary.writer.items() if name not in _TIMES}
        rows.append(
            [
                entry.folder,
                entry.stamp,
                entry.digest,
                int(entry.settled),
                summary.step,
                summary.parent,
                summary.attempt,
                summary.created,
                summary.total_bytes,
                number(summary.groups),
                number(writer),
                [summary.writer.get(name) for name in _TIMES],
                summary.metrics or None,
                number(summary.abandons) if summary.abandons else None,
                number(summary.skips) if summary.skips else None,
                summary.saved_by or None,
            ]
        )
    rest = json.dumps(rows, separators=(",", ":"))
    body = f'{{"version":{_VERSION},"table":[{",".join(table)}],"entries":{rest}}}'.encode()
    return digest_hex(body).encode() + b"\n" + body


def _decode(data: bytes) -> list[Entry]:
    """Return the entries of an intact file; raises ValueError, TypeError or LookupError for any other."""
    digest, body = data[:HEX_DIGITS], data[HEX_DIGITS + 1 :]
    if digest_hex(body).encode() != digest:
        raise ValueError("torn")
    fields = json.loads(body)
    if fields["version"] != _VERSION:
        raise ValueError("another version")
    table = [_shared(value) for value in fields["table"]]
    out = []
    for folder, stamp, digest, settled, *own, groups, writer, times, metrics, abandons, skips, saved_by in fields[
        "entries"
    ]:
        step, parent, attempt, created, total_bytes = own
        summary = ManifestSummary(
            step,
            parent,
            attempt,
            created,
            total_bytes,
            table[groups],
            table[writer] | {name: time for name, time in zip(_TIMES, times, strict=True) if time is not None},
            metrics or {},
            () if abandons is None else table[abandons],
            () if skips is None else table[skips],
            saved_by or "",
        )
        out.append(Entry(folder, stamp, digest, bool(settled), summary))
    return out


def _shared(value: Any) -> Any:
    """Return a value of the table as summaries have it: lists become tuples, of strings or of pairs."""
    if isinstance(value, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value
