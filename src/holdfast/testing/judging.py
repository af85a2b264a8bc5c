"""Judges of a root after a power loss: no corrupt or missing step, and the run can restore, save and collect."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.adapters.comm import current_ranks
from holdfast.checkpoint import retention
from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.run_identity import identify
from holdfast.checkpoint.tags import read_tags
from holdfast.core.errors import HoldfastError, NotFound
from holdfast.core.names import step_folder
from holdfast.core.terminal import no_progress
from holdfast.engine.blocking_save import BlockingSaver
from holdfast.engine.options import BackgroundOptions, LoadOptions, SaveOptions
from holdfast.engine.recovery import Leftovers
from holdfast.engine.restore import RestoreRequest, restore_stored
from holdfast.storage.local import LocalStorage
from holdfast.writer.in_flight import saves_in_flight
from holdfast.writer.startup_cleanup import clean_storage, dead_attempts

_DEADLINE_S = 30.0
_SILENCE_S = 0.005  # no other process works in a generated state


@dataclass(frozen=True, slots=True)
class Promise:
    """From now on the step must exist and be good, written by one of these attempts; without attempts it may go."""

    step: int
    attempts: tuple[str, ...]


def judge_steps(root: Path, promises: Sequence[Promise]) -> str:
    """Return what is wrong with the steps under a root: "corrupt ...", "missing ...", or ""."""
    storage = LocalStorage(root)
    good: dict[int, str] = {}
    for entry in committed_steps(storage):
        if isinstance(entry.problem, NotFound):
            continue  # not committed without a manifest
        try:
            checkpoint = Checkpoint(storage, entry.folder)
            report = checkpoint.verify()
        except HoldfastError as error:
            return f"corrupt: {error}"
        if not report.good:
            return f"corrupt: {entry.folder}: {report.damage[0].file}: {report.damage[0].problem}"
        good[entry.step] = checkpoint.manifest.attempt
    for step, attempts in {promise.step: promise.attempts for promise in promises}.items():
        if attempts and good.get(step) not in attempts:
            return f"missing: step {step} of {' or '.join(attempts)}, found {good.get(step)}"
    return ""


@dataclass(frozen=True, slots=True)
class RunJudge:
    """Judges a root like `judge_steps`, and then continues a run there: list, restore, save, gc.

    `fresh` makes a live state like the saved one. Any error of these calls is a verdict
    "stuck ...": a run that cannot start is no better than one that lost its steps. So is a
    leftover folder of a dead save.
    """

    fresh: Callable[[], MutableMapping[str, Any]]

    def __call__(self, root: Path, promises: Sequence[Promise]) -> str:
        verdict = judge_steps(root, promises)
        if verdict:
            return verdict
        storage = LocalStorage(root)
        step = 0
        for name, work in (("ls and top", _list), ("gc --dry-run", _find_dead)):
            try:
                work(storage)
            except HoldfastError as error:
                return f"stuck: {name}: {error}"
        try:
            step = self._restore(storage)
        except HoldfastError as error:
            return f"stuck: restore: {error}"
        promised = max((promise.step for promise in promises if promise.attempts), default=0)
        if step < promised:
            return f"missing: restored step {step}, but step {promised} was promised"
        try:
            saver = BlockingSaver(storage, SaveOptions())
            saver.save(current_ranks(_DEADLINE_S), step_folder(step + 1), self.fresh(), Lineage(step + 1))
            _collect(storage)
        except HoldfastError as error:
            return f"stuck: save and gc: {error}"
        left = [name for name in storage.hidden() if name.startswith((".attempt-", ".mail-", ".removed-"))]
        return f"stuck: {', '.join(left)} are never removed" if left else ""

    def _restore(self, storage: LocalStorage) -> int:
        """Start like a Checkpointer, but without a writer process; return the step, 0 if there is none."""
        ranks = current_ranks(_DEADLINE_S)
        options = BackgroundOptions(deadline_s=_DEADLINE_S, silence_s=_SILENCE_S)
        Leftovers(storage, identify(ranks, storage).key, options).clean(ranks)
        request = RestoreRequest(None, LoadOptions(), no_progress, _DEADLINE_S)
        restored = restore_stored(ranks, storage, self.fresh(), request)
        return 0 if restored is None else restored.step


def _list(storage: LocalStorage) -> None:
    committed_steps(storage)
    saves_in_flight(storage)
    read_tags(storage)
    retention.saved_policy(storage)


def _find_dead(storage: LocalStorage) -> set[str]:
    return dead_attempts(storage, _SILENCE_S)


def _collect(storage: LocalStorage) -> None:
    """Do what `holdfast gc` does."""
    clean_storage(storage, _find_dead(storage))
    retention.apply(storage, None)
    storage.sweep()
