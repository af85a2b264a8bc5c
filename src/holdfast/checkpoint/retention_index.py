"""The state of retention kept across saves, so that a save need not visit every step.

The first save scans everything, and so does every save of a root with up to a hundred steps.
In a larger root a save adds its own step. Before a removal there, names and stamps are compared
with the storage again: all of them up to a thousand; beyond that, those that decide what is
removed, and some of the others in turn. Every removed manifest is read in full first.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.checkpoint.catalog import Catalog, Committed
from holdfast.checkpoint.ledger import Ledger
from holdfast.checkpoint.lineage import LeftStep
from holdfast.checkpoint.tags import read_tags, tagged
from holdfast.format.names import step_folder
from holdfast.keep import Policy
from holdfast.storage.base import Storage

_ALWAYS = 100  # the number of steps compared at every save
_ALL = 1000  # the number of steps compared before a removal
_IN_TURN = 256
_ATTEMPTS = 3


class RetentionIndex:
    """The steps of one root, and those that a policy does not keep."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._turn = 0
        self._is_fresh = False  # True if everything was compared for this save
        self.forget()

    def forget(self) -> None:
        """Discard everything; the next `refresh` scans again."""
        self.catalog = Catalog(self._storage)
        self._ledger: Ledger | None = None

    def refresh(self, policy: Policy | None, committed: int | None) -> None:
        """Scan everything, or only the step that was just committed if the rest is known."""
        self._is_fresh = True
        if self._ledger is None or committed is None:
            self.catalog.scan()
        else:
            self.catalog.refresh(step_folder(committed))
            self._is_fresh = len(self.catalog) <= _ALWAYS
            if self._is_fresh:
                self.catalog.check(set(self.catalog.folders))
        if self._ledger is None or self._ledger.policy != policy:
            self._ledger = Ledger(self.catalog, policy)

    def _updated(self) -> Ledger:
        assert self._ledger is not None
        self._ledger.update()
        return self._ledger

    def abandoned(self) -> Mapping[LeftStep, Committed]:
        """Return the steps that a rewind abandoned and that still have their names."""
        return dict(self._updated().abandoned)

    def removable(self, committed: int) -> list[Committed]:
        """Return the steps that nothing keeps, after comparing them with the storage."""
        for _ in range(_ATTEMPTS):
            ledger = self._updated()
            removable = self._unprotected(ledger, ledger.removable(committed))
            if removable and not self._is_fresh:
                self.catalog.check(self._important(ledger, removable))
            if not self.catalog.changed:
                return removable
        return []  # other processes keep changing the root: the next save tries again

    def _unprotected(self, ledger: Ledger, entries: list[Committed]) -> list[Committed]:
        """Return the entries that no tag protects and whose records of left steps are not needed."""
        entries = [entry for entry in entries if not ledger.is_needed(entry)]
        tags = read_tags(self._storage).values() if entries else ()
        steps, attempts = {tag.step for tag in tags}, {tag.attempt for tag in tags}
        if not any(entry.step in steps or (entry.manifest and entry.manifest.attempt in attempts) for entry in entries):
            return entries
        self.catalog.scan()  # a tagged attempt may be in any folder now
        protected = tagged(self._storage, [*self.catalog.steps, *self.catalog.set_aside])
        return [entry for entry in entries if entry.folder not in protected]

    def _important(self, ledger: Ledger, removable: list[Committed]) -> set[str]:
        if len(self.catalog) <= _ALL:
            return set(self.catalog.folders)
        self._turn += _IN_TURN
        return {
            *(entry.folder for entry in removable[:_ALL]),
            *ledger.decisive_folders(_ALL),
            *self.catalog.sample(self._turn - _IN_TURN, _IN_TURN),
        }

    def write(self) -> None:
        """Update the catalog file."""
        self.catalog.write()
