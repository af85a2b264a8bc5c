"""The checkpoints under a root: which steps are committed, by their manifests alone.

A manifest that was read before and whose stamp is the same is not read again: a catalog
remembers it in memory, and in a file from process to process (see catalog_file.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from itertools import islice

from holdfast.checkpoint.catalog_file import CatalogFile, Entry
from holdfast.checkpoint.lineage import Left
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound, Untrusted
from holdfast.format.digest import digest_hex
from holdfast.format.manifest import decode_manifest
from holdfast.format.names import MANIFEST, folder_step, set_aside_step
from holdfast.format.summary import Summary
from holdfast.storage import trust_check
from holdfast.storage.base import Stamped, Storage, Tracked


@dataclass(frozen=True, slots=True)
class Committed:
    """One folder that bears a step's name: a summary of its manifest, or why that cannot be read."""

    step: int
    folder: str
    manifest: Summary | None
    problem: HoldfastError | None = None

    @property
    def trouble(self) -> str:
        """Why the step cannot be used, in a word for tables; "" if it can."""
        if self.problem is None:
            return ""
        return "NOT TRUSTED" if isinstance(self.problem, Untrusted) else "DAMAGED"

    @property
    def is_step(self) -> bool:
        """Whether it has a step's own name, and was not set aside."""
        return self.folder.startswith("step-")

    @property
    def damaged(self) -> bool:
        """Whether it may be passed over: what cannot be read just now, or is of a newer format, may not."""
        return isinstance(self.problem, Damaged | NotFound)


@dataclass(frozen=True, slots=True)
class _Known:
    """A folder that was looked at: what is in it, and the stamp and digest of the manifest that was read."""

    committed: Committed
    stamp: str = ""  # "" if it has to be read again at every look
    digest: str = ""
    settled: bool = False


class Catalog:
    """The folders of steps under a root, also those that were set aside. Knows nothing before `look`.

    `changed` are the folders that came, went or changed since whoever uses the catalog cleared it.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._tracked = storage if isinstance(storage, Tracked) else None
        self._known: dict[str, _Known] = {}
        self._stamps: dict[str, str] = {}  # of what is known, as the storage compares them
        self._file = CatalogFile(storage)
        self._require: Callable[[str], None] | None = None  # whether a folder may count at all
        self._unsettled: set[str] = set()
        self._unwritten: set[str] = set()
        self.changed: set[str] = set()

    @property
    def steps(self) -> list[Committed]:
        """Every step, oldest first; a folder without a good manifest says why."""
        found = [known.committed for known in self._known.values() if known.committed.is_step]
        return sorted(found, key=lambda entry: entry.step)

    @property
    def aside(self) -> list[Committed]:
        """The folders that were set aside, as abandoned or as damaged."""
        found = [known.committed for known in self._known.values() if not known.committed.is_step]
        return sorted(found, key=lambda entry: entry.folder)

    def get(self, folder: str) -> Committed | None:
        known = self._known.get(folder)
        return None if known is None else known.committed

    @property
    def folders(self) -> Collection[str]:
        """The names of all folders that are known."""
        return self._known.keys()

    def some(self, begin: int, count: int) -> list[str]:
        """A few folders, others for every `begin` until all had their turn."""
        begin %= max(1, len(self._known))
        return list(islice(self._known, begin, begin + count))

    def __len__(self) -> int:
        return len(self._known)

    def look(self) -> None:
        """Look at every folder under the root; reads the manifests that are not known."""
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
        """Take over from the file what it has of manifests that are still the same."""
        for entry in self._file.read():
            if stamps.get(entry.folder) != entry.stamp:
                continue
            step = _step_of(entry.folder)
            if step is not None and self._is_allowed(entry.folder):
                known = _Known(Committed(step, entry.folder, entry.summary), entry.stamp, entry.digest, entry.settled)
                self._set(entry.folder, known)
        self._unwritten.clear()

    def _is_allowed(self, folder: str) -> bool:
        """Whether a folder may count; of one that may not, the look at it says why."""
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
        """Look for changes, for certain at the `important` folders.

        Of a storage that is not tracked, this looks at everything.
        """
        if self._tracked is None:
            self.look()
        else:
            self._settle()
            for folder, stamp in self._tracked.changes(self._stamps, important).items():
                if stamp is None:
                    self.forget(folder)
                else:
                    self._compare(folder, stamp)

    def see(self, folder: str) -> None:
        """Look at one folder that has changed, or may have."""
        self._read(folder, _step_of(folder))

    def write(self) -> None:
        """Bring the file up to date. Nothing depends on that: a failure is left for the next time."""
        if self._tracked is None:
            return
        self._settle()
        self._file.write({folder: self._entry(folder) for folder in self._unwritten}, self._entries)
        self._unwritten.clear()

    def _entries(self) -> list[Entry]:
        return [entry for folder in self._known if (entry := self._entry(folder)) is not None]

    def _entry(self, folder: str) -> Entry | None:
        known = self._known.get(folder)
        if known is None or known.committed.manifest is None or not known.stamp:
            return None
        return Entry(folder, known.stamp, known.digest, known.settled, known.committed.manifest)

    def _settle(self) -> None:
        """Read once more what was read so soon after it was written that a change might not show in its stamp."""
        for folder in sorted(self._unsettled):
            self._confirm(folder)

    def _confirm(self, folder: str) -> bool:
        """Whether an unsettled manifest still has the bytes that were read; else it is read anew."""
        assert self._tracked is not None
        known = self._known[folder]
        try:
            found = self._tracked.read_stamped(folder, limits.JSON_BYTES)
        except HoldfastError:
            found = None
        if found is None or found.stamp != known.stamp or digest_hex(found.data) != known.digest:
            self.see(folder)
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
            self._required(folder)  # before anything of it counts: a manifest also says which steps to give up
            if self._tracked is not None:
                stamped = self._tracked.read_stamped(folder, limits.JSON_BYTES)
                data = stamped.data
            else:
                data = self.storage.read(folder, MANIFEST, limits.JSON_BYTES)
            found = Committed(step, folder, _summary(data, step, f"{self.storage.name}/{folder}"))
        except HoldfastError as error:
            if isinstance(error, NotFound) and folder not in self.storage.folders():
                self.forget(folder)  # it went meanwhile
                return
            found = Committed(step, folder, None, error)
        known = _Known(found)
        if stamped is not None:
            known = _Known(found, stamped.stamp, digest_hex(stamped.data), stamped.settled)
        self._set(folder, known)

    def _set(self, folder: str, known: _Known) -> None:
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
        """Take a folder out: it was removed or renamed."""
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


def _summary(data: bytes, step: int, where: str) -> Summary:
    manifest = decode_manifest(data, where)
    if manifest.step != step:
        raise Damaged(f"{where}: its manifest is of step {manifest.step}")
    return Summary.of(manifest)


def committed_steps(storage: Storage) -> list[Committed]:
    """Every step under the root, oldest first; a folder without a good manifest says why."""
    return _looked_at(storage).steps


def set_aside(storage: Storage) -> list[Committed]:
    """The folders that were set aside, as abandoned or as damaged, with their manifests."""
    return _looked_at(storage).aside


def _looked_at(storage: Storage) -> Catalog:
    catalog = Catalog(storage)
    catalog.look()
    return catalog


def living_steps(storage: Storage) -> list[Committed]:
    """The steps of the living branch, oldest first: without those that a restore left behind.

    The first commit after a rewind names what it gave up, and sets it aside under another
    name; where that was cut short, its word still keeps them from coming back.
    """
    return living(committed_steps(storage))


def newest_readable(storage: Storage, tell: Callable[[str], None]) -> Committed | None:
    """The newest step of the living branch whose manifest can be read; `tell` hears of the newer ones, passed over."""
    for entry in reversed(living_steps(storage)):
        if entry.manifest is not None:
            return entry
        tell(f"step {entry.step} is passed over: {entry.problem}")
    return None


def living(found: list[Committed]) -> list[Committed]:
    """Those of all steps that no manifest gave up."""
    left = steps_left(found)
    return [entry for entry in found if not is_left(entry, left)] if left else found


def steps_left(found: Iterable[Committed]) -> set[Left]:
    """The steps, with their attempts, that some manifest says were left."""
    return {left for entry in found if entry.manifest for left in (*entry.manifest.abandons, *entry.manifest.skips)}


def is_left(entry: Committed, left: Collection[Left]) -> bool:
    return entry.manifest is not None and (entry.step, entry.manifest.attempt) in left
