"""What retention knows of a root from save to save, so that a save does not look at every step.

The first save looks at everything, and so does every save of a root with up to a hundred steps.
In a larger one a save adds its own step. Before anything is removed there, names and stamps are
compared with the storage once more: up to a thousand of them all, beyond that those that decide what
goes, and some of the others in turn. Whatever is removed is read in full before.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.checkpoint.catalog import Catalog, Committed
from holdfast.checkpoint.ledger import Ledger
from holdfast.checkpoint.lineage import Left
from holdfast.checkpoint.tags import read_tags, tagged
from holdfast.format.names import step_folder
from holdfast.keep import Policy
from holdfast.storage.base import Storage

_ALWAYS = 100  # so many are compared at every save
_ALL = 1000  # so many are compared before something is removed
_IN_TURN = 256
_LOOKS = 3


class RetentionIndex:
    """The steps of one root, and which of them a policy lets go."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._turn = 0
        self._is_fresh = False  # whether everything was compared for this save
        self.forget()

    def forget(self) -> None:
        """Begin anew with the next look."""
        self.catalog = Catalog(self._storage)
        self._ledger: Ledger | None = None

    def look(self, policy: Policy | None, committed: int | None) -> None:
        """Look at everything, or at the step that was just committed if the rest is known."""
        self._is_fresh = True
        if self._ledger is None or committed is None:
            self.catalog.look()
        else:
            self.catalog.see(step_folder(committed))
            self._is_fresh = len(self.catalog) <= _ALWAYS
            if self._is_fresh:
                self.catalog.check(set(self.catalog.folders))
        if self._ledger is None or self._ledger.policy != policy:
            self._ledger = Ledger(self.catalog, policy)

    def _updated(self) -> Ledger:
        assert self._ledger is not None
        self._ledger.update()
        return self._ledger

    def abandoned(self) -> Mapping[Left, Committed]:
        """The steps that a rewind gave up and that still have their names."""
        return dict(self._updated().abandoned)

    def going(self, committed: int) -> list[Committed]:
        """The steps that nothing keeps, once that has been compared with the storage."""
        for _ in range(_LOOKS):
            ledger = self._updated()
            going = self._unprotected(ledger, ledger.going(committed))
            if going and not self._is_fresh:
                self.catalog.check(self._important(ledger, going))
            if not self.catalog.changed:
                return going
        return []  # others change the root all the time: the next save tries again

    def _unprotected(self, ledger: Ledger, entries: list[Committed]) -> list[Committed]:
        """Those that no tag protects, and that are not needed to say which steps were left."""
        entries = [entry for entry in entries if not ledger.is_needed(entry)]
        tags = read_tags(self._storage).values() if entries else ()
        steps, attempts = {tag.step for tag in tags}, {tag.attempt for tag in tags}
        if not any(entry.step in steps or (entry.manifest and entry.manifest.attempt in attempts) for entry in entries):
            return entries
        self.catalog.look()  # where a tagged attempt is now is known from all folders
        protected = tagged(self._storage, [*self.catalog.steps, *self.catalog.aside])
        return [entry for entry in entries if entry.folder not in protected]

    def _important(self, ledger: Ledger, going: list[Committed]) -> set[str]:
        if len(self.catalog) <= _ALL:
            return set(self.catalog.folders)
        self._turn += _IN_TURN
        return {
            *(entry.folder for entry in going[:_ALL]),
            *ledger.deciding(_ALL),
            *self.catalog.some(self._turn - _IN_TURN, _IN_TURN),
        }

    def write(self) -> None:
        """Bring the catalogue file up to date."""
        self.catalog.write()
