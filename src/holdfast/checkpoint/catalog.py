"""The catalog of the steps under a root: scan manifests, notice changes, find the living branch and set-aside steps.

A manifest whose stamp is unchanged is not read again. A catalog remembers manifests in memory,
and in a file across processes (see catalog_file.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from itertools import islice

from holdfast.checkpoint.catalog_file import CatalogFile, Entry
from holdfast.checkpoint.lineage import LeftStep
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound, Untrusted
from holdfast.core.names import MANIFEST, folder_step, set_aside_step
from holdfast.format.digest import digest_hex
from holdfast.format.manifest import decode_manifest
from holdfast.format.summary import ManifestSummary
from holdfast.storage import trust_check
from holdfast.storage.base import Stamped, Storage, Tracked


@dataclass(frozen=True, slots=True)
class Committed:
    """A folder with a step's name: the summary of its manifest, or the reason why it cannot be read."""

    step: int
    folder: str
    manifest: ManifestSummary | None
    problem: HoldfastError | None = None

    @property
    def problem_label(self) -> str:
        """A short label for tables if the step cannot be used, else ""."""
        if self.problem is None:
            return ""
        return "NOT TRUSTED" if isinstance(self.problem, Untrusted) else "DAMAGED"

    @property
    def is_step(self) -> bool:
        """True if the folder has the step's own name and was not set aside."""
        return self.folder.startswith("step-")

    @property
    def damaged(self) -> bool:
        """True if a restore may skip the step: not for temporary read errors or a newer format."""
        return isinstance(self.problem, Damaged | NotFound)


@dataclass(frozen=True, slots=True)
class _ScannedFolder:
    """The last scan of a folder: its step, and the stamp and digest of the manifest that was read."""

    committed: Committed
    stamp: str = ""  # "" if every scan must read it again
    digest: str = ""
    settled: bool = False


class Catalog:
    """The folders of steps under a root, including those set aside. Empty before `scan`.

    `changed` has the folders added, removed or changed since the user of the catalog cleared it.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._tracked = storage if isinstance(storage, Tracked) else None
        self._known: dict[str, _ScannedFolder] = {}
        self._stamps: dict[str, str] = {}  # stamps of known folders, as the storage compares them
        self._file = CatalogFile(storage)
        self._require: Callable[[str], None] | None = None  # raises for a folder that must not be used
        self._unsettled: set[str] = set()
        self._unwritten: set[str] = set()
        self.changed: set[str] = set()

    @property
    def steps(self) -> list[Committed]:
        """Every step, oldest first; a folder without a good manifest has a problem."""
        found = [known.committed for known in self._known.values() if known.committed.is_step]
        return sorted(found, key=lambda entry: entry.step)

    @property
    def set_aside(self) -> list[Committed]:
        """The folders that were set aside as abandoned or damaged."""
        found = [known.committed for known in self._known.values() if not known.committed.is_step]
        return sorted(found, key=lambda entry: entry.folder)

    def get(self, folder: str) -> Committed | None:
        known = self._known.get(folder)
        return None if known is None else known.committed

    @property
    def folders(self) -> Collection[str]:
        """The names of all known folders."""
        return self._known.keys()

    def sample(self, begin: int, count: int) -> list[str]:
        """Return `count` folders starting at `begin`; successive values of `begin` visit all folders."""
        begin %= max(1, len(self._known))
        return list(islice(self._known, begin, begin + count))

    def __len__(self) -> int:
        return len(self._known)

    def scan(self) -> None:
        """Scan every folder under the root; reads the manifests that are not known."""
        self._require = trust_check(self.storage)
        if self._tracked is None:
            stamps = dict.fromkeys(self.storage.folders(), "")
        else:
            stamps = self._tracked.stamps()
            if not self._known:
                self._recall(stamps)
        for folder in self._known.keys() - stamps.keys():
            self.forget(folder)
        for folder, stamp in stamps.items():
            self._compare(folder, stamp)

    def _recall(self, stamps: dict[str, str]) -> None:
        """Take from the file the entries whose manifests are unchanged."""
        for entry in self._file.read():
            if stamps.get(entry.folder) != entry.stamp:
                continue
            step = _step_of(entry.folder)
            if step is not None and self._is_allowed(entry.folder):
                known = _ScannedFolder(
                    Committed(step, entry.folder, entry.summary), entry.stamp, entry.digest, entry.settled
                )
                self._set(entry.folder, known)
        self._unwritten.clear()

    def _is_allowed(self, folder: str) -> bool:
        """Return True if a folder may be used; otherwise its scan records the reason."""
        try:
            self._required(folder)
        except HoldfastError:
            return False
        return True

    def _required(self, folder: str) -> None:
        if self._require is None:
            self._require = trust_check(self.storage)
        self._require(folder)

    def check(self, important: Collection[str]) -> None:
        """Find changes: reliably in the `important` folders, where possible in others.

        A storage that is not tracked is scanned completely.
        """
        if self._tracked is None:
            self.scan()
        else:
            self._confirm_unsettled()
            for folder, stamp in self._tracked.changes(self._stamps, important).items():
                if stamp is None:
                    self.forget(folder)
                else:
                    self._compare(folder, stamp)

    def refresh(self, folder: str) -> None:
        """Scan one folder that may have changed."""
        self._read(folder, _step_of(folder))

    def write(self) -> None:
        """Update the file. Nothing depends on the file: a failure is left for the next time."""
        if self._tracked is None:
            return
        self._confirm_unsettled()
        self._file.write({folder: self._entry(folder) for folder in self._unwritten}, self._entries)
        self._unwritten.clear()

    def _entries(self) -> list[Entry]:
        return [entry for folder in self._known if (entry := self._entry(folder)) is not None]

    def _entry(self, folder: str) -> Entry | None:
        known = self._known.get(folder)
        if known is None or known.committed.manifest is None or not known.stamp:
            return None
        return Entry(folder, known.stamp, known.digest, known.settled, known.committed.manifest)

    def _confirm_unsettled(self) -> None:
        """Re-read manifests that were read too soon after a write for their stamps to show a change."""
        for folder in sorted(self._unsettled):
            self._confirm(folder)

    def _confirm(self, folder: str) -> bool:
        """Return True if an unsettled manifest is unchanged; otherwise read it again."""
        assert self._tracked is not None
        known = self._known[folder]
        try:
            found = self._tracked.read_stamped(folder, limits.JSON_BYTES)
        except HoldfastError:
            found = None
        if found is None or found.stamp != known.stamp or digest_hex(found.data) != known.digest:
            self.refresh(folder)
            return False
        self._known[folder] = replace(known, settled=found.settled)
        if found.settled:
            self._unsettled.discard(folder)
            self._unwritten.add(folder)
        return True

    def _compare(self, folder: str, stamp: str) -> None:
        known = self._known.get(folder)
        if known is None or not stamp or known.stamp != stamp:
            self._read(folder, _step_of(folder))
        elif folder in self._unsettled:
            self._confirm(folder)

    def _read(self, folder: str, step: int | None) -> None:
        if step is None:
            return
        stamped: Stamped | None = None
        try:
            self._required(folder)  # first: a manifest also tells which steps to give up
            if self._tracked is not None:
                stamped = self._tracked.read_stamped(folder, limits.JSON_BYTES)
                data = stamped.data
            else:
                data = self.storage.read(folder, MANIFEST, limits.JSON_BYTES)
            found = Committed(step, folder, _summary(data, step, f"{self.storage.name}/{folder}"))
        except HoldfastError as error:
            if isinstance(error, NotFound) and folder not in self.storage.folders():
                self.forget(folder)  # removed in the meantime
                return
            found = Committed(step, folder, None, error)
        known = _ScannedFolder(found)
        if stamped is not None:
            known = _ScannedFolder(found, stamped.stamp, digest_hex(stamped.data), stamped.settled)
        self._set(folder, known)

    def _set(self, folder: str, known: _ScannedFolder) -> None:
        before = self._known.get(folder)
        if before is None or not _is_same(before.committed, known.committed):
            self.changed.add(folder)
        self._known[folder] = known
        self._stamps[folder] = known.stamp
        self._unwritten.add(folder)
        self._unsettled.discard(folder)
        if known.stamp and not known.settled:
            self._unsettled.add(folder)
        if self._tracked is not None and known.committed.manifest is not None:
            self._tracked.recall(folder, known.stamp, known.committed.manifest.attempt)

    def forget(self, folder: str) -> None:
        """Delete a removed or renamed folder from the catalog."""
        if self._known.pop(folder, None) is not None:
            del self._stamps[folder]
            self.changed.add(folder)
            self._unwritten.add(folder)
            self._unsettled.discard(folder)


def _is_same(one: Committed, other: Committed) -> bool:
    return one.manifest == other.manifest and str(one.problem) == str(other.problem)


def _step_of(folder: str) -> int | None:
    step = folder_step(folder)
    return set_aside_step(folder) if step is None else step


def _summary(data: bytes, step: int, where: str) -> ManifestSummary:
    manifest = decode_manifest(data, where)
    if manifest.step != step:
        raise Damaged(f"{where}: its manifest belongs to step {manifest.step}")
    return ManifestSummary.of(manifest)


def committed_steps(storage: Storage) -> list[Committed]:
    """Return every step under the root, oldest first; a folder without a good manifest has a problem."""
    return _scanned(storage).steps


def set_aside_folders(storage: Storage) -> list[Committed]:
    """Return the folders that were set aside as abandoned or damaged, with their manifests."""
    return _scanned(storage).set_aside


def _scanned(storage: Storage) -> Catalog:
    catalog = Catalog(storage)
    catalog.scan()
    return catalog


def living_steps(storage: Storage) -> list[Committed]:
    """Return the steps of the living branch, oldest first: without those that a restore left behind.

    The first commit after a rewind names the steps it abandons, and sets them aside under another
    name. If that is interrupted, its manifest still keeps them from coming back.
    """
    return living(committed_steps(storage))


def newest_readable(storage: Storage, report: Callable[[str], None]) -> Committed | None:
    """Return the newest living step with a readable manifest; `report` is called for each newer one skipped."""
    for entry in reversed(living_steps(storage)):
        if entry.manifest is not None:
            return entry
        report(f"step {entry.step} is skipped: {entry.problem}")
    return None


def living(found: list[Committed]) -> list[Committed]:
    """Return the steps that no manifest has left behind."""
    left = left_steps(found)
    return [entry for entry in found if not is_left(entry, left)] if left else found


def left_steps(found: Iterable[Committed]) -> set[LeftStep]:
    """Return the steps, with their attempts, that some manifest left behind."""
    return {left for entry in found if entry.manifest for left in (*entry.manifest.abandons, *entry.manifest.skips)}


def is_left(entry: Committed, left: Collection[LeftStep]) -> bool:
    return entry.manifest is not None and (entry.step, entry.manifest.identity) in left
