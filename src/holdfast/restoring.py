"""Restoring: the newest good checkpoint of the living branch, the same one on every rank.

Damage that one rank sees makes every rank go back to the step before. What was passed over,
and what a rewind gives up, is told to the next save, which records it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import Damaged, HoldfastError, NotFound
from holdfast.core.ranks import Ranks, together
from holdfast.format.names import damaged_folder, step_folder
from holdfast.loading import LoadOptions, LoadReport, load_checkpoint
from holdfast.persist.catalog import Committed, committed_steps, living_steps
from holdfast.persist.checkpoint import Checkpoint
from holdfast.persist.lineage import Left, Lineage
from holdfast.persist.retention import free_name
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
class _Choice:
    """The steps to try, newest first, with their attempts; later ones that a rewind gives up; what is damaged."""

    candidates: list[Left]
    later: list[Left]
    damaged: list[tuple[int, str]]  # steps, and why


def restore_stored(
    ranks: Ranks, storage: Storage, state: MutableMapping[str, Any], request: Request
) -> Restored | None:
    """Load the newest good checkpoint, or the one of the step that was asked for; None if there is none.

    Raises Damaged if every one is damaged, on every rank.
    """
    choice = _choose(ranks, storage, request.step)
    request.skipped.extend(f"step {step}: {problem}" for step, problem in choice.damaged)
    skips: list[Left] = []
    for step, attempt in choice.candidates:
        try:
            report = request.load(ranks, lambda step=step: Checkpoint(storage, step_folder(step)), state)  # type: ignore[misc]
        except Damaged as error:
            if request.step is not None:
                raise
            request.skipped.append(f"step {step}: {error}")
            skips.append((step, attempt))
            continue
        except NotFound:
            if request.step is not None or _is_there(ranks, storage, step):
                raise
            continue  # retention took it away meanwhile: a newer one was committed, or an older one is good
        if request.move_damaged:
            _move_damaged(ranks, storage, [step for step, _ in (*choice.damaged, *skips)])
        return Restored(step, report, Lineage(None, step, abandons=tuple(choice.later), skips=tuple(skips)))
    _require_none(storage, request)
    return None


def _choose(ranks: Ranks, storage: Storage, step: int | None) -> _Choice:
    """One decision for all ranks, by what rank 0 sees."""

    def look() -> list[Any] | None:
        if ranks.rank:
            return None
        living = living_steps(storage)
        if step is None:
            return [*_sorted_out(reversed(living)), []]
        asked = [entry for entry in committed_steps(storage) if entry.step == step]
        for entry in asked:
            if entry.problem is not None:
                raise entry.problem
        later = [[entry.step, entry.manifest.attempt] for entry in living if entry.manifest and entry.step > step]
        return [[[entry.step, entry.manifest.attempt] for entry in asked if entry.manifest], [], later]

    answer = together(ranks, look)[0]
    assert answer is not None
    candidates, damaged, later = ([(first, second) for first, second in found] for found in answer)
    return _Choice(candidates, later, damaged)


def _sorted_out(entries: Any) -> tuple[list[list[Any]], list[list[Any]]]:
    """Those that may be tried, and those that are damaged; what cannot be read just now raises."""
    good: list[list[Any]] = []
    bad: list[list[Any]] = []
    for entry in entries:
        if entry.manifest is not None:
            good.append([entry.step, entry.manifest.attempt])
        elif entry.damaged:
            bad.append([entry.step, str(entry.problem)])
        else:
            raise _unreadable(entry)
    return good, bad


def _unreadable(entry: Committed) -> HoldfastError:
    assert entry.problem is not None
    kind = type(entry.problem)
    return kind(f"{entry.problem}; restore(step=N) takes another step, and gives up this one")


def _is_there(ranks: Ranks, storage: Storage, step: int) -> bool:
    return any(together(ranks, lambda: step_folder(step) in storage.folders()))


def _move_damaged(ranks: Ranks, storage: Storage, steps: list[int]) -> None:
    """Set damaged checkpoints aside as `damaged-step-N`."""

    def move() -> None:
        if ranks.rank == 0:
            for step in steps:
                storage.rename(step_folder(step), free_name(storage, damaged_folder(step)))

    together(ranks, move)


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
    return len(report.loaded) == sum(map(len, checkpoint.places.values())) and report.values >= len(plain)
