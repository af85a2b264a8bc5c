"""Restore from storage: choose the newest good step for all ranks, load it, skip and rename damaged ones.

Damage that one rank sees makes every rank go back to the step before. The next save records the
steps that were skipped or abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
from holdfast.core.events import Event, Listener, ignore_event
from holdfast.core.names import damaged_folder, step_folder
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.terminal import Progress
from holdfast.engine.load import load_checkpoint
from holdfast.engine.load_report import LoadReport
from holdfast.engine.options import LoadOptions
from holdfast.engine.peek import Peek, peek_at
from holdfast.storage import Storage

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """The arguments of one restore, and its findings so far.

    `skipped` describes the checkpoints that were skipped. `touched` names the groups of the live
    state that a failed load has overwritten.
    """

    step: int | None
    options: LoadOptions
    progress: Progress | None
    deadline_s: float
    move_damaged: bool = False
    listener: Listener = ignore_event
    skipped: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)

    def load(self, ranks: Ranks, opener: Callable[[], Checkpoint], state: MutableMapping[str, Any]) -> LoadReport:
        """Load one checkpoint with these arguments; every rank returns or raises alike."""
        return load_checkpoint(
            ranks,
            opener,
            state,
            self.options,
            self.progress,
            deadline_s=self.deadline_s,
            touched=self.touched,
            listener=self.listener,
        )


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored step, and the lineage of the next save."""

    step: int
    report: LoadReport
    origin: Lineage


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A step to try: the attempt that wrote it, or the error for which it cannot be opened."""

    step: int
    attempt: str
    error: tuple[str, str] | None = None  # as a record, the same on every rank

    @staticmethod
    def of(entry: Committed) -> _Candidate:
        if entry.manifest is not None:
            return _Candidate(entry.step, entry.manifest.identity)
        assert entry.problem is not None
        name, message = error_record(entry.problem)
        if entry.damaged:
            return _Candidate(entry.step, "", (Damaged.__name__, message))
        return _Candidate(entry.step, "", (name, f"{message}; move {entry.folder} away to continue without it"))


@dataclass(frozen=True, slots=True)
class _Choice:
    """The steps to try, newest first, and the later steps that a rewind abandons. Rank 0 sends it to all ranks."""

    candidates: tuple[_Candidate, ...]
    later: tuple[LeftStep, ...] = ()

    def fields(self) -> list[Any]:
        """Return the JSON form."""
        candidates = [[entry.step, entry.attempt, entry.error and list(entry.error)] for entry in self.candidates]
        return [candidates, [list(left) for left in self.later]]

    @staticmethod
    def from_fields(fields: Sequence[Any]) -> _Choice:
        candidates, later = fields
        return _Choice(
            tuple(_Candidate(step, attempt, error and tuple(error)) for step, attempt, error in candidates),
            tuple((step, attempt) for step, attempt in later),
        )


def restore_stored(
    ranks: Ranks,
    storage: Storage,
    state: MutableMapping[str, Any],
    request: RestoreRequest,
    catalog: Catalog | None = None,
) -> Restored | None:
    """Load the newest good checkpoint, or that of the requested step; return None if none exists.

    `catalog` is a catalog of the root, if there is one. Raises Damaged on every rank if every checkpoint is damaged.
    """
    choice = _choose(ranks, catalog or Catalog(storage), request.step)
    skips: list[LeftStep] = []
    found = _first_good(ranks, storage, choice, request, skips, lambda opener: request.load(ranks, opener, state))
    if found is None:
        return None
    step, report = found
    if request.move_damaged:
        _move_damaged(ranks, storage, skips, request)
    left = tuple((step, attempt) for step, attempt in skips if attempt)
    return Restored(step, report, Lineage(None, step, abandons=choice.later, skips=left))


def peek_stored(ranks: Ranks, storage: Storage, request: RestoreRequest, catalog: Catalog | None = None) -> Peek | None:
    """Look at the newest good checkpoint; return None if none exists. All of it is read if `request` verifies."""
    choice = _choose(ranks, catalog or Catalog(storage), None)

    def look(opener: Callable[[], Checkpoint]) -> Peek:
        return peek_at(ranks, opener, request.options.mesh, verify=request.options.verify)

    found = _first_good(ranks, storage, choice, request, [], look)
    return None if found is None else found[1]


def _first_good(
    ranks: Ranks,
    storage: Storage,
    choice: _Choice,
    request: RestoreRequest,
    skips: list[LeftStep],
    use: Callable[[Callable[[], Checkpoint]], _Result],
) -> tuple[int, _Result] | None:
    """Return the first step that `use` does not find damaged, and its result; the damaged ones go to `skips`."""
    for candidate in choice.candidates:
        step = candidate.step
        try:
            if candidate.error is not None:
                raise error_from_record(list(candidate.error))
            return step, use(_opener(storage, step))
        except Damaged as error:
            if request.step is not None:
                raise
            request.skipped.append(f"step {step}: {error}")
            if ranks.rank == 0:
                request.listener(Event("damaged", step, detail=str(error)))
            skips.append((step, candidate.attempt))
        except NotFound:
            if request.step is not None or _is_there(ranks, storage, step):
                raise
            # Else retention removed it meanwhile: a newer one was committed, or an older one is good.
    _require_empty(storage, request)
    return None


def _opener(storage: Storage, step: int) -> Callable[[], Checkpoint]:
    return lambda: Checkpoint(storage, step_folder(step))


def _choose(ranks: Ranks, catalog: Catalog, step: int | None) -> _Choice:
    """Choose the steps to try, for all ranks, by the catalog of rank 0."""

    def choose() -> list[Any] | None:
        if ranks.rank:
            return None
        catalog.scan()
        committed = catalog.steps
        if step is None:
            return _Choice(tuple(_Candidate.of(entry) for entry in reversed(living(committed)))).fields()
        requested = tuple(_Candidate.of(entry) for entry in committed if entry.step == step)
        later = [entry for entry in committed if entry.step > step]
        for entry in later:
            _require_known(entry, step)
        left = tuple((entry.step, entry.manifest.identity) for entry in later if entry.manifest)
        return _Choice(requested, left).fields()

    fields = run_on_all_ranks(ranks, choose)[0]
    assert fields is not None
    return _Choice.from_fields(fields)


def _require_known(entry: Committed, step: int) -> None:
    """Refuse to go back before a step that cannot be read now: its attempt is unknown, so it would come back.

    An untrusted step of another user does not come back: restoring it is refused until it is trusted.
    """
    if entry.manifest is None and not entry.damaged and not isinstance(entry.problem, Untrusted):
        raise StorageError(
            f"step {entry.step} cannot be read now, so that going back to {step} could not abandon it: "
            f"{entry.problem}; try again, or move {entry.folder} away"
        )


def _is_there(ranks: Ranks, storage: Storage, step: int) -> bool:
    return any(run_on_all_ranks(ranks, lambda: step_folder(step) in storage.folders()))


def _move_damaged(ranks: Ranks, storage: Storage, skips: Sequence[LeftStep], request: RestoreRequest) -> None:
    """Rename damaged checkpoints to `damaged-step-N`; a checkpoint that cannot be renamed is reported and stays."""

    def move() -> list[str]:
        problems = []
        for step, attempt in skips if ranks.rank == 0 else ():
            try:
                storage.rename(step_folder(step), unused_name(storage, damaged_folder(step)), attempt)
            except HoldfastError as error:
                problems.append(f"step {step} could not be moved: {error}")
        return problems

    request.skipped.extend(run_on_all_ranks(ranks, move)[0])


def _require_empty(storage: Storage, request: RestoreRequest) -> None:
    """Raise unless there was no checkpoint to restore."""
    if request.step is not None:
        raise NotFound(f"{storage.name} has no checkpoint of step {request.step}")
    if request.skipped:
        live = (
            f"of the live state these were overwritten with parts of them: {', '.join(sorted(request.touched))}"
            if request.touched
            else "the live state was not touched"
        )
        raise Damaged(f"{storage.name}: no checkpoint is good; {live}\n  " + "\n  ".join(request.skipped))
