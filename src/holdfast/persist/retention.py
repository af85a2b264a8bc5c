"""Retention at work: removes checkpoints that no policy keeps, after a successor is committed.

Never the newest of the living branch, never a tagged one, never one that somebody reads. A
removal begins with a rename, so that no reader ever takes half a folder for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import HoldfastError
from holdfast.format.names import abandoned_folder
from holdfast.keep import Policy
from holdfast.persist.catalog import Committed, committed_steps, living_steps
from holdfast.persist.tags import tags
from holdfast.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Decision:
    """One checkpoint: whether it stays, and why."""

    entry: Committed
    reasons: tuple[str, ...]

    @property
    def stays(self) -> bool:
        return bool(self.reasons)


@dataclass(slots=True)
class Outcome:
    """What a round of retention did; `problems` are of what it could not do."""

    decisions: list[Decision] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    aside: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def decide(storage: Storage, policy: Policy) -> list[Decision]:
    """What a policy says of every step of the living branch, oldest first."""
    living = living_steps(storage)
    good = [entry.manifest for entry in living if entry.manifest is not None]
    kept = policy.kept(good)
    newest = max((manifest.step or 0 for manifest in good), default=None)
    by_attempt: dict[tuple[int, str], list[str]] = {}
    for name, fields in tags(storage).items():
        by_attempt.setdefault((fields["step"], str(fields.get("attempt"))), []).append(name)
    decisions = []
    for entry in living:
        reasons = []
        if entry.manifest is None:
            reasons.append("damaged: look at it yourself")
        else:
            reasons += kept.get(entry.step, [])
            reasons += [f"tag {name}" for name in by_attempt.get((entry.step, entry.manifest.attempt), [])]
            if entry.step == newest:
                reasons.append("the newest")
        decisions.append(Decision(entry, tuple(reasons)))
    return decisions


def apply(storage: Storage, policy: Policy) -> Outcome:
    """Remove what nothing keeps. What fails is told and left for the next time: it never fails a save."""
    outcome = Outcome()
    try:
        set_aside(storage, outcome)
        outcome.decisions = decide(storage, policy)
    except HoldfastError as error:
        outcome.problems.append(str(error))
        return outcome
    for decision in outcome.decisions:
        if not decision.stays:
            try:
                gone = storage.remove(decision.entry.folder)
                (outcome.removed if gone else outcome.busy).append(decision.entry.step)
            except HoldfastError as error:
                outcome.problems.append(f"step {decision.entry.step}: {error}")
    return outcome


def set_aside(storage: Storage, outcome: Outcome) -> None:
    """Rename the steps that a rewind left behind, so that nobody takes them for the living branch."""
    living = {entry.folder for entry in living_steps(storage)}
    for entry in committed_steps(storage):
        if entry.folder not in living:
            try:
                storage.rename(entry.folder, _free(storage, abandoned_folder(entry.step)))
                outcome.aside.append(entry.step)
            except HoldfastError as error:
                outcome.problems.append(f"step {entry.step} could not be set aside: {error}")


def _free(storage: Storage, name: str) -> str:
    taken: Sequence[str] = storage.folders()
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free
