"""Retention at work: takes away what no policy keeps, once a successor is committed.

Never the newest of the living branch, never a tagged one, never one that somebody reads.
Removing is a rename first, so that no reader ever takes half a folder for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast.checkpoint.catalog import Committed, committed_steps, living, set_aside
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import Left
from holdfast.checkpoint.retention_index import RetentionIndex
from holdfast.checkpoint.tags import read_tags, tagged
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, InvalidArgument, NotFound, Untrusted
from holdfast.core.events import Event
from holdfast.format import strictjson
from holdfast.format.manifest import decode_manifest
from holdfast.format.names import MANIFEST, abandoned_folder
from holdfast.format.summary import Summary
from holdfast.keep import Policy
from holdfast.storage import trust_check
from holdfast.storage.base import Storage

_FOLDER, _FILE = ".policy", "keep.json"


@dataclass(frozen=True, slots=True)
class Decision:
    """One checkpoint: why it stays; it goes if there is no reason."""

    entry: Committed
    reasons: tuple[str, ...]

    @property
    def stays(self) -> bool:
        return bool(self.reasons)


@dataclass(slots=True)
class Outcome:
    """What a round of retention did; `problems` are of what it could not do, and will try again."""

    removed: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    aside: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def events(self, step: int | None) -> list[Event]:
        """What there is to tell after the commit of a step."""
        told = [Event("removed", gone, detail="no policy keeps it") for gone in self.removed]
        told += [Event("set aside", gone, detail="a rewind left it behind") for gone in self.aside]
        told += [Event("failed", step, detail=f"retention: {problem}") for problem in self.problems]
        return told


def decide(
    storage: Storage, policy: Policy, committed: int | None = None, found: list[Committed] | None = None
) -> list[Decision]:
    """What a policy says of every step of the living branch, oldest first; `found` are all steps, if they are known.

    `committed` is the step that was just committed: it stays, whatever its number. Where none
    was, and something would go, the newest that is good is looked for, byte by byte, and stays.
    """
    found = committed_steps(storage) if found is None else found
    good = [entry.manifest for entry in living(found) if entry.manifest is not None]
    kept = policy.kept(good)
    newest = max((manifest.step or 0 for manifest in good), default=None)
    tags = tagged(storage, [*found, *set_aside(storage)]) if read_tags(storage) else {}
    needed = _needed(found)
    decisions = []
    for entry in living(found):
        reasons = list(kept.get(entry.step, ())) + [f"tag {name}" for name in tags.get(entry.folder, ())]
        if entry.manifest is None:
            reasons.append(f"{entry.trouble.lower()}: look at it, it is not removed by itself")
        elif entry.step in (newest, committed):
            reasons.append("the newest")
        elif entry.folder in needed:
            reasons.append("it says which steps were left")
        decisions.append(Decision(entry, tuple(reasons)))
    if committed is None and not all(decision.stays for decision in decisions):
        _spare_the_newest_good(storage, decisions)
    return decisions


def _spare_the_newest_good(storage: Storage, decisions: list[Decision]) -> None:
    for at, decision in reversed(list(enumerate(decisions))):
        if decision.entry.manifest is not None and _is_good(storage, decision.entry.folder):
            if not decision.stays:
                decisions[at] = Decision(decision.entry, ("the newest that is good",))
            return
    decisions[:] = [Decision(one.entry, one.reasons or ("no step is good: none is removed",)) for one in decisions]


def _is_good(storage: Storage, folder: str) -> bool:
    try:
        return Checkpoint(storage, folder).verify().good
    except HoldfastError:
        return False


def _needed(found: list[Committed]) -> set[str]:
    """The folders whose manifests give up steps that are still there under their names, as no other manifest does."""
    naming: dict[Left, set[str]] = {}
    for entry in found:
        if entry.manifest is not None:
            for left in (*entry.manifest.abandons, *entry.manifest.skips):
                naming.setdefault(left, set()).add(entry.folder)
    there = {(entry.step, entry.manifest.attempt) for entry in found if entry.manifest} if naming else set()
    return {folder for left, folders in naming.items() if left in there and len(folders) == 1 for folder in folders}


def apply(
    storage: Storage, policy: Policy | None, committed: int | None = None, index: RetentionIndex | None = None
) -> Outcome:
    """Set aside what rewinds gave up, and take away what nothing keeps.

    What fails is told and left for the next time: it never fails a save. With the `index` of the
    save before, the cost does not grow with the number of steps.
    """
    outcome = Outcome()
    index = RetentionIndex(storage) if index is None else index
    try:
        index.look(policy, committed)
        _set_aside(storage, index, outcome)
        if committed is not None:
            with _noting(outcome, committed):
                _remember(storage, policy)
        going = _going(storage, policy, committed, index)
    except (HoldfastError, OSError) as error:
        index.forget()
        outcome.problems.append(str(error))
        return outcome
    for entry in going:
        with _noting(outcome, entry.step):
            _remove(storage, entry, index, outcome)
    index.write()
    return outcome


def _going(storage: Storage, policy: Policy | None, committed: int | None, index: RetentionIndex) -> list[Committed]:
    if policy is None:
        return []
    if committed is not None:
        return index.going(committed)
    decisions = decide(storage, policy, None, index.catalog.steps)
    return [decision.entry for decision in decisions if not decision.stays]


def _remove(storage: Storage, entry: Committed, index: RetentionIndex, outcome: Outcome) -> None:
    """Take a step away, unless it was tagged, damaged or saved again since it was judged."""
    assert entry.manifest is not None
    if any(tag.attempt == entry.manifest.attempt for tag in read_tags(storage).values()):
        return
    try:
        where = f"{storage.name}/{entry.folder}"
        manifest = decode_manifest(storage.read(entry.folder, MANIFEST, limits.JSON_BYTES), where)
    except (Damaged, NotFound):
        index.catalog.see(entry.folder)
        return
    if Summary.of(manifest) != entry.manifest:
        index.catalog.see(entry.folder)
    elif storage.remove(entry.folder, entry.manifest.attempt):
        index.catalog.forget(entry.folder)
        outcome.removed.append(entry.step)
    else:
        outcome.busy.append(entry.step)


def _set_aside(storage: Storage, index: RetentionIndex, outcome: Outcome) -> None:
    """Rename the steps that a rewind gave up, so that nobody takes them for the living branch."""
    for entry in _named_first(index.abandoned()):
        assert entry.manifest is not None
        with _noting(outcome, entry.step):
            name = free_name(storage, abandoned_folder(entry.step))
            storage.rename(entry.folder, name, entry.manifest.attempt)
            outcome.aside.append(entry.step)
            index.catalog.forget(entry.folder)
            index.catalog.see(name)
        if outcome.problems:
            break  # what names this one must stay, or it would come back


def _named_first(left: Mapping[Left, Committed]) -> list[Committed]:
    """Those that another one gives up come before that other one, so that at no time one is hidden by nobody."""
    seen: set[Left] = set()
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
def _noting(outcome: Outcome, step: int) -> Iterator[None]:
    try:
        yield
    except NotFound:
        pass  # another process was faster
    except (HoldfastError, OSError) as error:
        outcome.problems.append(f"step {step}: {error}")


def free_name(storage: Storage, name: str) -> str:
    """A folder's name, with a number if it is taken."""
    taken = storage.folders()
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free


def _remember(storage: Storage, policy: Policy | None) -> None:
    """Write a run's policy down, for `holdfast gc`; also that it has none, if one before it had."""
    try:
        if remembered(storage) == policy:
            return
    except Damaged:
        pass  # what cannot be read is written anew
    if _FOLDER not in storage.hidden():
        storage.begin(_FOLDER)
    storage.note(_FOLDER, _FILE, strictjson.dumps(policy.fields() if policy else None), durable=True)


def remembered(storage: Storage) -> Policy | None:
    """The policy of the run that saved here last, None if it had none."""
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
