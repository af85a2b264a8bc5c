"""Retention: decide which steps stay, remove the others, set abandoned ones aside, store the policy for gc.

The newest step of the living branch, tagged steps and steps being read are never removed. A
removal renames the folder first, so that no reader takes half a folder for a checkpoint.

The state of retention is kept across saves, so that a save need not visit every step. The first
save scans everything, and so does every save of a root with up to a hundred steps. In a larger
root a save adds its own step. Before a removal there, names and stamps are compared with the
storage again: all of them up to a thousand; beyond that, those that decide what is removed, and
some of the others in turn. Every removed manifest is read in full first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast.checkpoint.catalog import Catalog, Committed, committed_steps, living, set_aside_folders
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.ledger import Ledger
from holdfast.checkpoint.lineage import LeftStep
from holdfast.checkpoint.tags import read_tags, tagged
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, InvalidArgument, NotFound, Untrusted
from holdfast.core.events import Event
from holdfast.core.names import MANIFEST, abandoned_folder, step_folder
from holdfast.format import strictjson
from holdfast.format.manifest import decode_manifest
from holdfast.format.summary import ManifestSummary
from holdfast.keep import Policy
from holdfast.storage import trust_check
from holdfast.storage.base import Storage

_FOLDER, _FILE = ".policy", "keep.json"
_ALWAYS = 100  # the number of steps compared at every save
_ALL = 1000  # the number of steps compared before a removal
_IN_TURN = 256
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Decision:
    """A checkpoint and the reasons to keep it; it is removed if there is none."""

    entry: Committed
    reasons: tuple[str, ...]

    @property
    def stays(self) -> bool:
        return bool(self.reasons)


@dataclass(slots=True)
class RetentionResult:
    """The result of a round of retention; `problems` are failures to try again later."""

    removed: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    aside: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def events(self, step: int | None) -> list[Event]:
        """Return the events to report after the commit of a step."""
        events = [Event("removed", gone, detail="no policy keeps it") for gone in self.removed]
        events += [Event("set aside", gone, detail="a rewind left it behind") for gone in self.aside]
        events += [Event("failed", step, detail=f"retention: {problem}") for problem in self.problems]
        return events


def decide(
    storage: Storage,
    policy: Policy,
    committed: int | None = None,
    found: list[Committed] | None = None,
    aside: list[Committed] | None = None,
) -> list[Decision]:
    """Judge every step of the living branch by a policy, oldest first; `found` are all steps, if known.

    `aside` are the folders that were set aside, if known.
    `committed` is the step that was just committed; it always stays. Without it, and if a step would
    be removed, the newest step whose bytes verify stays as well.
    """
    found = committed_steps(storage) if found is None else found
    good = [entry.manifest for entry in living(found) if entry.manifest is not None]
    kept = policy.kept(good)
    newest = max((manifest.step or 0 for manifest in good), default=None)
    tags = _tags(storage, found, aside)
    needed = _needed(found)
    decisions = []
    for entry in living(found):
        reasons = list(kept.get(entry.step, ())) + [f"tag {name}" for name in tags.get(entry.folder, ())]
        if entry.manifest is None:
            reasons.append(f"{entry.problem_label.lower()}: not removed automatically, inspect it")
        elif entry.step in (newest, committed):
            reasons.append("the newest")
        elif entry.folder in needed:
            reasons.append("it records which steps were left behind")
        decisions.append(Decision(entry, tuple(reasons)))
    if committed is None and not all(decision.stays for decision in decisions):
        _keep_newest_good(storage, decisions)
    return decisions


def _tags(storage: Storage, found: list[Committed], aside: list[Committed] | None) -> dict[str, list[str]]:
    """Return the names of tags by protected folder; without tags, nothing else is read."""
    if not read_tags(storage):
        return {}
    return tagged(storage, [*found, *(set_aside_folders(storage) if aside is None else aside)])


def _keep_newest_good(storage: Storage, decisions: list[Decision]) -> None:
    for at, decision in reversed(list(enumerate(decisions))):
        if decision.entry.manifest is not None and _is_good(storage, decision.entry.folder):
            if not decision.stays:
                decisions[at] = Decision(decision.entry, ("the newest good step",))
            return
    decisions[:] = [Decision(one.entry, one.reasons or ("no step is good, so none is removed",)) for one in decisions]


def _is_good(storage: Storage, folder: str) -> bool:
    try:
        return Checkpoint(storage, folder).verify().good
    except HoldfastError:
        return False


def _needed(found: list[Committed]) -> set[str]:
    """Return the folders whose manifests are the only ones to leave behind a step that still has its name."""
    naming: dict[LeftStep, set[str]] = {}
    for entry in found:
        if entry.manifest is not None:
            for left in (*entry.manifest.abandons, *entry.manifest.skips):
                naming.setdefault(left, set()).add(entry.folder)
    there = {(entry.step, entry.manifest.identity) for entry in found if entry.manifest} if naming else set()
    return {folder for left, folders in naming.items() if left in there and len(folders) == 1 for folder in folders}


def apply(
    storage: Storage, policy: Policy | None, committed: int | None = None, index: RetentionIndex | None = None
) -> RetentionResult:
    """Set aside the steps that rewinds abandoned, and remove those that nothing keeps.

    Failures are reported and left for the next time: they never fail a save. With the `index` of
    the previous save, the cost does not grow with the number of steps.
    """
    outcome = RetentionResult()
    index = RetentionIndex(storage) if index is None else index
    try:
        index.refresh(policy, committed)
        _set_aside(storage, index, outcome)
        if committed is not None:
            with _recording_problems(outcome, committed):
                _save_policy(storage, policy)
        removable = _removable(storage, policy, committed, index)
    except (HoldfastError, OSError) as error:
        index.forget()
        outcome.problems.append(str(error))
        return outcome
    for entry in removable:
        with _recording_problems(outcome, entry.step):
            _remove(storage, entry, index, outcome)
    index.write()
    return outcome


def _removable(
    storage: Storage, policy: Policy | None, committed: int | None, index: RetentionIndex
) -> list[Committed]:
    if policy is None:
        return []
    if committed is not None:
        return index.removable(committed)
    decisions = decide(storage, policy, None, index.catalog.steps)
    return [decision.entry for decision in decisions if not decision.stays]


def _remove(storage: Storage, entry: Committed, index: RetentionIndex, outcome: RetentionResult) -> None:
    """Remove a step, unless it was tagged, damaged or saved again since it was judged."""
    assert entry.manifest is not None
    if any(tag.attempt == entry.manifest.identity for tag in read_tags(storage).values()):
        return
    try:
        where = f"{storage.name}/{entry.folder}"
        manifest = decode_manifest(storage.read(entry.folder, MANIFEST, limits.JSON_BYTES), where)
    except (Damaged, NotFound):
        index.catalog.refresh(entry.folder)
        return
    if ManifestSummary.of(manifest) != entry.manifest:
        index.catalog.refresh(entry.folder)
    elif storage.remove(entry.folder, entry.manifest.attempt):
        index.catalog.forget(entry.folder)
        outcome.removed.append(entry.step)
    else:
        outcome.busy.append(entry.step)


def _set_aside(storage: Storage, index: RetentionIndex, outcome: RetentionResult) -> None:
    """Rename the steps that a rewind abandoned, so that they are not taken for the living branch."""
    for entry in _set_aside_order(index.abandoned()):
        assert entry.manifest is not None
        with _recording_problems(outcome, entry.step):
            name = unused_name(storage, abandoned_folder(entry.step))
            storage.rename(entry.folder, name, entry.manifest.attempt)
            outcome.aside.append(entry.step)
            index.catalog.forget(entry.folder)
            index.catalog.refresh(name)
        if outcome.problems:
            break  # the manifest that abandons this step must stay, or the step would come back


def _set_aside_order(left: Mapping[LeftStep, Committed]) -> list[Committed]:
    """Order steps before those that abandon them, so that an abandoned step never loses its record."""
    seen: set[LeftStep] = set()
    order: list[Committed] = []
    for first in left:
        waiting = [(first, False)]
        while waiting:
            key, is_done = waiting.pop()
            manifest = left[key].manifest
            if is_done:
                order.append(left[key])
            elif key not in seen and manifest is not None:
                seen.add(key)
                waiting.append((key, True))
                named = [other for other in (*manifest.abandons, *manifest.skips) if other in left]
                waiting += [(other, False) for other in reversed(named)]
    return order


@contextmanager
def _recording_problems(outcome: RetentionResult, step: int) -> Iterator[None]:
    try:
        yield
    except NotFound:
        pass  # another process was faster
    except (HoldfastError, OSError) as error:
        outcome.problems.append(f"step {step}: {error}")


def unused_name(storage: Storage, name: str) -> str:
    """Return `name`, or `name-N` if a folder has that name already."""
    taken = storage.folders()
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def _save_policy(storage: Storage, policy: Policy | None) -> None:
    """Save a run's policy for `holdfast gc`, or that it has none if an earlier run had one."""
    try:
        if saved_policy(storage) == policy:
            return
    except Damaged:
        pass  # an unreadable policy is written again
    if _FOLDER not in storage.hidden():
        storage.begin(_FOLDER)
    storage.note(_FOLDER, _FILE, strictjson.dumps(policy.fields() if policy else None), durable=True)


def saved_policy(storage: Storage) -> Policy | None:
    """Return the policy of the last run that saved here, None if it had none."""
    where = f"{storage.name}/{_FOLDER}/{_FILE}"
    try:
        trust_check(storage)(_FOLDER)
        data = storage.read(_FOLDER, _FILE, limits.JSON_BYTES)
    except NotFound:
        return None
    except Untrusted as error:
        raise Untrusted(f"the policy of the run: {error}; or give gc a policy with --keep") from None
    try:
        fields = strictjson.loads(data, where)
        return None if fields is None else Policy.from_fields(fields)
    except (InvalidArgument, Damaged) as error:
        raise Damaged(f"{where}: {error}; give gc a policy with --keep") from None


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
