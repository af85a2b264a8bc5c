"""Restoring: the newest good checkpoint of the living branch, the same one on every rank.

Damage that one rank sees makes every rank go back to the step before. What was passed over,
and what a rewind gives up, is told to the next save, which records it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.catalog import Catalog, Committed, living
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import LeftStep, Lineage
from holdfast.checkpoint.retention import unused_name
from holdfast.core.errors import (
    Damaged,
    HoldfastError,
    NotFound,
    StorageError,
    Untrusted,
    error_from_record,
    error_record,
)
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.load import LoadOptions, LoadReport, load_checkpoint
from holdfast.format.names import damaged_folder, step_folder
from holdfast.storage import Storage


@dataclass(frozen=True, slots=True)
class Request:
    """One restore: which step, how, and what was found on the way.

    `skipped` says in words what was passed over; `touched` names the live state that a load
    which failed has overwritten.
    """

    step: int | None
    options: LoadOptions
    progress: Callable[[int], None]
    deadline_s: float
    move_damaged: bool = False
    skipped: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)

    def load(self, ranks: Ranks, opener: Callable[[], Checkpoint], state: MutableMapping[str, Any]) -> LoadReport:
        """Load one checkpoint as was asked; every rank returns or raises alike."""
        return load_checkpoint(
            ranks, opener, state, self.options, self.progress, deadline_s=self.deadline_s, touched=self.touched
        )


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, and what the next save comes from."""

    step: int
    report: LoadReport
    origin: Lineage


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One step to try: the attempt that wrote it, or the error for which it cannot be opened."""

    step: int
    attempt: str
    error: list[str] | None = None  # as a record, the same on every rank


@dataclass(frozen=True, slots=True)
class _Choice:
    """The steps to try, newest first, and the later ones that a rewind gives up."""

    candidates: list[_Candidate]
    later: list[LeftStep]


def restore_stored(
    ranks: Ranks,
    storage: Storage,
    state: MutableMapping[str, Any],
    request: Request,
    catalog: Catalog | None = None,
) -> Restored | None:
    """Load the newest good checkpoint, or the one of the step that was asked for; None if there is none.

    `catalog` is what is known of the root already. Raises Damaged if every one is damaged, on every rank.
    """
    choice = _choose(ranks, catalog or Catalog(storage), request.step)
    skips: list[LeftStep] = []
    for candidate in choice.candidates:
        step = candidate.step
        try:
            if candidate.error is not None:
                raise error_from_record(candidate.error)
            report = request.load(ranks, _opener(storage, step), state)
        except Damaged as error:
            if request.step is not None:
                raise
            request.skipped.append(f"step {step}: {error}")
            skips.append((step, candidate.attempt))
            continue
        except NotFound:
            if request.step is not None or _is_there(ranks, storage, step):
                raise
            continue  # retention took it away meanwhile: a newer one was committed, or an older one is good
        if request.move_damaged:
            _move_damaged(ranks, storage, skips, request)
        left = tuple((step, attempt) for step, attempt in skips if attempt)
        return Restored(step, report, Lineage(None, step, abandons=tuple(choice.later), skips=left))
    _require_none(storage, request)
    return None


def _opener(storage: Storage, step: int) -> Callable[[], Checkpoint]:
    return lambda: Checkpoint(storage, step_folder(step))


def _choose(ranks: Ranks, catalog: Catalog, step: int | None) -> _Choice:
    """One decision for all ranks, by what rank 0 sees."""

    def look() -> list[Any] | None:
        if ranks.rank:
            return None
        catalog.scan()
        committed = catalog.steps
        if step is None:
            return [[_described(entry) for entry in reversed(living(committed))], []]
        asked = [_described(entry) for entry in committed if entry.step == step]
        later = [entry for entry in committed if entry.step > step]
        for entry in later:
            _require_known(entry, step)
        return [asked, [[entry.step, entry.manifest.attempt] for entry in later if entry.manifest]]

    answer = run_on_all_ranks(ranks, look)[0]
    assert answer is not None
    candidates, later = answer
    return _Choice([_Candidate(*fields) for fields in candidates], [(step, attempt) for step, attempt in later])


def _described(entry: Committed) -> list[Any]:
    if entry.manifest is not None:
        return [entry.step, entry.manifest.attempt, None]
    assert entry.problem is not None
    name, message = error_record(entry.problem)
    if entry.damaged:
        return [entry.step, "", [Damaged.__name__, message]]
    return [entry.step, "", [name, f"{message}; move {entry.folder} away to go on without it"]]


def _require_known(entry: Committed, step: int) -> None:
    """Refuse to go back before a step that cannot be read just now: it could not be named, and would come back.

    One of another user that is not trusted does not come back by itself: restoring it is refused until it is allowed.
    """
    if entry.manifest is None and not entry.damaged and not isinstance(entry.problem, Untrusted):
        raise StorageError(
            f"step {entry.step} cannot be read just now, so that going back to {step} could not give it up: "
            f"{entry.problem}; try again, or move {entry.folder} away"
        )


def _is_there(ranks: Ranks, storage: Storage, step: int) -> bool:
    return any(run_on_all_ranks(ranks, lambda: step_folder(step) in storage.folders()))


def _move_damaged(ranks: Ranks, storage: Storage, skips: Sequence[LeftStep], request: Request) -> None:
    """Set damaged checkpoints aside as `damaged-step-N`; one that cannot be moved is told of, and stays."""

    def move() -> list[str]:
        problems = []
        for step, attempt in skips if ranks.rank == 0 else ():
            try:
                storage.rename(step_folder(step), unused_name(storage, damaged_folder(step)), attempt)
            except HoldfastError as error:
                problems.append(f"step {step} could not be moved: {error}")
        return problems

    request.skipped.extend(run_on_all_ranks(ranks, move)[0])


def _require_none(storage: Storage, request: Request) -> None:
    """Nothing was restored: that is good only if there is nothing."""
    if request.step is not None:
        raise NotFound(f"{storage.name} has no checkpoint of step {request.step}")
    if request.skipped:
        live = (
            f"of the live state these were overwritten with parts of them: {', '.join(sorted(request.touched))}"
            if request.touched
            else "the live state was not touched"
        )
        raise Damaged(f"{storage.name}: no checkpoint is good; {live}\n  " + "\n  ".join(request.skipped))


def is_whole(report: LoadReport, checkpoint: Checkpoint) -> bool:
    """Whether a load took everything that a checkpoint holds."""
    plain = [entry for entry in checkpoint.state.values() if entry["kind"] not in ("optimizer", "tensors", "module")]
    return len(report.loaded) == sum(
        len(group.tensors) for group in checkpoint.contents.groups.values()
    ) and report.values >= len(plain)
