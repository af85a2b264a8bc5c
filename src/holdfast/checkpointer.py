"""A run's checkpoints: save steps under one root, restore the newest good one."""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import secrets
import shlex
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.api import DEADLINE_S
from holdfast.checkpoint import retention
from holdfast.checkpoint.catalog import living_steps
from holdfast.checkpoint.checkpoint import no_progress
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.retention_index import RetentionIndex
from holdfast.checkpoint.run_identity import RunKey, identify
from holdfast.core import limits
from holdfast.core.errors import (
    Damaged,
    HoldfastError,
    InvalidArgument,
    Mismatch,
    NoArena,
    StorageError,
    Unsupported,
)
from holdfast.core.events import Event, Listener, log_event, safe_listener
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import warn
from holdfast.engine.blocking_save import Saver
from holdfast.engine.load import LoadOptions, LoadReport
from holdfast.engine.recovery import Captured, Cleaned, Leftovers
from holdfast.engine.restore import Request, is_whole, restore_stored
from holdfast.engine.save_handle import Refusal, SaveHandle
from holdfast.engine.signals import Termination
from holdfast.engine.survey import SaveOptions
from holdfast.format.names import step_folder
from holdfast.keep import Policy, check_metrics
from holdfast.mapping.per_module import MappingLike, check_mapping
from holdfast.storage import Storage, is_checkpoint, storage_at
from holdfast.storage.base import SharedStorage, Tracked
from holdfast.storage.local import LocalStorage
from holdfast.when import Occasion, Schedule
from holdfast.writer.captured_checkpoint import captured_checkpoint

if TYPE_CHECKING:
    from holdfast.engine.background_save import BackgroundSaver

__all__ = ["Checkpointer", "SaveHandle"]

_POLL_S = 0.02
_TRIES = 3
_LIVING: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
_NO_IDENTITY = (
    "{} has no .holdfast-root that can be read or made: a state that cannot be written is not kept in memory for the "
    "next start"
)
_LAST_STEP = 2**62  # steps are compared between ranks as 64-bit numbers


class Checkpointer:
    """Saves and restores the steps of one run. Every rank makes one with the same root.

    `save` returns at once: the state is captured into shared memory while training goes on,
    and a writer process makes it a checkpoint. A failed save does not stop training: it
    warns, emits an event, and the handle's `result()` raises.

    `keep` says which steps stay, such as `holdfast.keep.last(3) | holdfast.keep.every(1000)`;
    all of them if it is not given. `when` says which steps `save_if_due` saves, such as
    `holdfast.when.steps(500) | holdfast.when.preempted()`. `on_busy` says what a save does
    while the one before is still being written: "wait" or "skip". `arena_bytes` caps the shared
    memory that this rank may take. `grace_s` is how long SIGTERM waits for the save in flight.
    `on_event` hears of every phase, from any thread. `mapping` says what the live tensors are
    called and look like in the checkpoints, as `holdfast.save` takes it; `restore` reads them
    through its reverse.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        mapping: MappingLike | Mapping[str, MappingLike] | None = None,
        max_shard_size: int | str = "5GB",
        block_bytes: int = limits.BLOCK_BYTES,
        model_dtype: str | None = None,
        ties: Mapping[str, str] | None = None,
        replicas: str = "error",
        mesh: Any = None,
        keep: Policy | None = None,
        when: Occasion | None = None,
        on_busy: str = "wait",
        arena_bytes: int | str | None = None,
        writer_threads: int | None = None,
        grace_s: float = 30.0,
        deadline_s: float = DEADLINE_S,
        silence_s: float = 60.0,
        on_event: Listener = log_event,
    ) -> None:
        options = SaveOptions(max_shard_size, block_bytes, model_dtype, ties or {}, replicas, mesh, mapping)
        if mapping is not None:
            check_mapping(mapping, reversible=True)  # or nothing that is saved could be restored
        if keep is not None and not isinstance(keep, Policy):
            raise InvalidArgument(f"keep={keep!r} is not a policy: write holdfast.keep.last(3), for one")
        if when is not None and not isinstance(when, Occasion):
            raise InvalidArgument(f"when={when!r} is no occasion: write holdfast.when.steps(1000), for one")
        if on_busy not in ("wait", "skip"):
            raise InvalidArgument(f"on_busy={on_busy!r}: choose 'wait' or 'skip'")
        for name, seconds in (("grace_s", grace_s), ("deadline_s", deadline_s), ("silence_s", silence_s)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise InvalidArgument(f"{name}={seconds!r} is not a number of seconds")
        if writer_threads is not None and (not isinstance(writer_threads, int) or writer_threads < 1):
            raise InvalidArgument(f"writer_threads={writer_threads!r} is not a whole number from 1 on")
        if not callable(on_event):
            raise InvalidArgument(f"on_event={on_event!r} cannot be called with an event")
        self.storage = storage_at(root)
        if isinstance(self.storage, LocalStorage):
            with contextlib.suppress(StorageError):  # a root that cannot be read is told of by the first save
                self._refuse_checkpoint(self.storage)
        self._options = options
        self._keep = keep
        self._grace_s = grace_s
        self._schedule = None if when is None else Schedule(when, grace_s=grace_s)
        self._on_busy = on_busy
        self._arena_bytes = None if arena_bytes is None else limits.parse_bytes(arena_bytes)
        self._threads = writer_threads
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._listener = safe_listener(on_event)
        self._owner = os.getpid()
        self._unrestored = True
        self._keep_captured = False
        self._rewriting: SaveHandle | None = None
        self._saver = Saver(self.storage, options)
        # Said at the end of a call: a warning that is made an error must not leave other ranks waiting.
        self._warnings_due: list[str] = []
        self._background: BackgroundSaver | None = None
        self._leftovers: Leftovers | None = None
        self._origin = Lineage(None)  # what the next save comes from
        self._retention: RetentionIndex | None = None  # of blocking saves
        self._closed = False
        self._lock = threading.RLock()  # calls of several threads follow each other
        _LIVING.add(self)
        itself = weakref.ref(self)
        schedule = self._schedule or Schedule(Occasion())
        self._termination = Termination(lambda: _finish(itself, grace_s), schedule.accept_signal, schedule.signals)
        if schedule.signals and not self._termination.install():
            warn("signals are not heard: make the Checkpointer in the main thread for when.preempted() to work")
        self.last_report: LoadReport | None = None
        _close_at_exit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """Finish the save in flight, and let the writer go. A closed Checkpointer saves no more.

        After `timeout` seconds (the deadline, if not given) it goes without waiting: the
        writer finishes by itself. A state that could not be written stays in the memory of
        this host until the next start under the same root.
        """
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        self._termination.remove()
        if self._background is None:
            return
        timeout = self._deadline_s if timeout is None else timeout
        if not self._background.is_idle and timeout > 0:
            self._listener(Event("closing", detail=f"waiting up to {timeout:.0f} s for the save in flight"))
        if not self._background.close(timeout, keep=self._wants_kept):
            self._background.warnings_due.append("the writer is still at work after close(); it finishes by itself")
        self._forget_rewritten()
        self._say_warnings()

    def _wants_kept(self) -> bool:
        """Return whether a state that could not be written is to stay in memory.

        One that was restored from memory is still there: a second copy of it is of no use.
        """
        return self._rewriting is None or self._rewriting.error is None

    def __del__(self) -> None:
        """Let the writer go; it finishes by itself."""
        background = getattr(self, "_background", None)
        if background is not None and not self._closed and self._owner == os.getpid():
            self._closed = True
            background.close(0.0)

    @property
    def is_idle(self) -> bool:
        """Whether no save is in flight."""
        return self._background is None or self._background.is_idle

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for the save in flight, well or not; False if it is not over within `timeout` seconds."""
        return self._background is None or self._background.wait(self._deadline_s if timeout is None else timeout)

    def prepare(self, state: MutableMapping[str, Any]) -> None:
        """Get ready in the background, so that the first save is as cheap as the tenth. Collective.

        `restore` does this by itself when the state has an optimizer.
        """
        with self._lock:
            self._refuse_if_closed()
            _check_state(state)
            ranks = self._ranks()
            self._begin(ranks)
            if self._background is not None:
                self._background.prepare(ranks, state)
            self._say_warnings()

    def save(
        self, step: int, state: MutableMapping[str, Any], *, metrics: Mapping[str, Any] | None = None
    ) -> SaveHandle:
        """Save the state as `step`, as it is now. Saving a committed step again replaces it, unless it is the same.

        `metrics` are numbers by name, such as {"loss": 2.31}, for `keep.best`; those of rank 0
        are stored.
        """
        with self._lock:
            handle = self._save_now(step, state, metrics)
            self._say_warnings()
            return handle

    def save_if_due(
        self, step: int, state: MutableMapping[str, Any], *, metrics: Mapping[str, Any] | None = None
    ) -> SaveHandle | None:
        """Save the state if the occasion that `when` names has come, else return None. Call it after every step.

        After a signal that `when.preempted` names, it waits until the step is committed, for
        `grace_s` at most; `preempted` is true from then on.
        """
        if self._schedule is None:
            raise InvalidArgument("save_if_due: the Checkpointer was not told when; give it when=holdfast.when....")
        with self._lock:
            self._refuse_if_closed()
            step = _whole_step(step)
            before = self._schedule.preempted
            if not self._schedule.is_due(self._ranks(), step):
                return None
            if self._schedule.preempted and not before:
                handle = self._save_at_last(step, state, metrics)
            else:
                handle = self._save_now(step, state, metrics)
            self._say_warnings()
            return handle

    def _notice_older_run(self, ranks: Ranks, step: int) -> None:
        """After the first save of a run that restored nothing: say that a restart would go on from another's step."""
        if ranks.rank or not isinstance(self.storage, SharedStorage):
            return
        with contextlib.suppress(HoldfastError):  # the save itself tells of a storage that fails
            higher = [entry.step for entry in living_steps(self.storage) if entry.manifest and entry.step > step]
            if higher:
                detail = (
                    f"{self.storage.name} has step {higher[-1]} of a run that was not restored: a restart takes that, "
                    "and retention counts it among the newest; call restore(state) first, or choose an empty root"
                )
                self._listener(Event("unrestored", step, detail=detail))

    def _save_at_last(
        self, step: int, state: MutableMapping[str, Any], metrics: Mapping[str, Any] | None
    ) -> SaveHandle:
        """Save before the process is ended: after the save in flight, never skipped for it, and to the commit."""
        self._listener(Event("preempted", step))
        for _ in range(_TRIES):
            self.finish(self._grace_s)
            handle = self._save_now(step, state, metrics)
            if not handle.skipped:
                break
        handle.wait(self._grace_s)
        assert self._schedule is not None
        self._schedule.answered()
        return handle

    @property
    def preempted(self) -> bool:
        """Whether a signal said that the process will be ended, and `save_if_due` has heard of it on every rank."""
        return self._schedule is not None and self._schedule.preempted

    def _save_now(self, step: int, state: MutableMapping[str, Any], metrics: Mapping[str, Any] | None) -> SaveHandle:
        started = time.perf_counter()
        ranks = self._ranks()
        if self._background is None:
            step = run_on_all_ranks(ranks, lambda: self._checked(step, state, metrics))[ranks.rank]
            try:
                self._begin(ranks)
            except HoldfastError as error:
                handle = self._not_saved(ranks, step, error)
                if self._schedule is not None:
                    self._schedule.saved(handle)
                return handle
        is_first = self._unrestored
        if self._background is not None:
            self._background.settle()  # SIGTERM is heard meanwhile
            if (self._unrestored or self._keep_captured) and self._leftovers is not None:
                self._keep_captured = False
                self._rewriting = None
                self._leftovers.drop(ranks)  # the run goes on: what was captured before is not wanted
        self._unrestored = False
        with self._termination:
            try:
                handle = self._save(ranks, step, state, metrics)
            except Refusal as refusal:
                raise refusal.error from None
        handle.stall_ms = (time.perf_counter() - started) * 1000
        if is_first:
            self._notice_older_run(ranks, handle.step)  # now that the step is known to be one
        if self._schedule is not None:
            self._schedule.saved(handle)
        return handle

    def _save(
        self, ranks: Ranks, step: int, state: MutableMapping[str, Any], metrics: Mapping[str, Any] | None
    ) -> SaveHandle:
        def check() -> int:
            return self._checked(step, state, metrics)

        try:
            if self._background is not None:
                try:
                    return self._background.save(ranks, check, state, lambda: self._coming_from(metrics))
                except NoArena as error:
                    self._stop_background(ranks, error)
            step = check()
            lineage = replace(self._coming_from(metrics), step=step)
            checkpoint = self._saver.save(ranks, step_folder(step), state, lineage)
            run_on_all_ranks(ranks, lambda: self._tidy(ranks, step))
        except HoldfastError as error:
            return self._not_saved(ranks, operator.index(step), error)
        self._origin = replace(self._origin, parent=step)
        handle = SaveHandle(step, self._deadline_s)
        handle.succeed(lambda: checkpoint)
        if ranks.rank == 0:
            self._listener(Event("published", step, bytes=checkpoint.manifest.total_bytes, detail="blocking"))
        return handle

    def _tidy(self, ranks: Ranks, step: int) -> None:
        """After a blocking save, rank 0 does what the writer does in the background."""
        if ranks.rank == 0:
            self._retention = self._retention or RetentionIndex(self.storage)
            for event in retention.apply(self.storage, self._keep, step, self._retention).events(step):
                self._listener(event)
            try:
                if isinstance(self.storage, Tracked):
                    self.storage.sweep_some()
                else:
                    self.storage.sweep()
            except (HoldfastError, OSError) as error:  # the step is committed: the next save tries again
                self._listener(Event("failed", step, detail=f"deleting what was removed: {error}"))

    def _not_saved(self, ranks: Ranks, step: int, error: HoldfastError) -> SaveHandle:
        """A save that failed at the call: it warns, and training goes on."""
        handle = SaveHandle(step, self._deadline_s)
        handle.fail(error)
        self._listener(Event("failed", step, ranks.rank, detail=str(error)))
        self._warnings_due.append(f"step {step} was not saved: {error}")
        return handle

    def say_last_words(self, grace_s: float) -> None:
        """Before SIGTERM ends the process: what failed, and what is still being written."""
        if not self.is_idle:
            late = f"the save in flight was not written within {grace_s:.0f} s: its writer goes on by itself"
            self._warnings_due.append(late)
        self._say_warnings()

    def _stop_background(self, ranks: Ranks, error: NoArena) -> None:
        """Save in the foreground from now on: there is no memory to capture into. All ranks come here alike."""
        assert self._background is not None
        self._background.close(self._deadline_s)
        self._warnings_due += self._background.warnings_due
        published = self._background.last_published
        self._origin = self._origin if published is None else replace(self._origin, parent=published)
        self._background = None
        self._saver = Saver(self.storage, self._options)
        if ranks.rank == 0:
            self._warnings_due.append(f"saves block until they are written from now on: {error}")

    def _say_warnings(self) -> None:
        """What happened meanwhile, also behind training's back, is said where the caller hears it."""
        if self._background is not None:
            self._warnings_due += self._background.warnings_due
            self._background.warnings_due.clear()
        while self._warnings_due:
            warn(self._warnings_due.pop(0))

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise Unsupported(f"the Checkpointer of {self.storage.name} is closed")

    def _coming_from(self, metrics: Mapping[str, Any] | None) -> Lineage:
        return replace(self._origin, metrics=check_metrics(metrics))

    def _checked(self, step: Any, state: Any, metrics: Any) -> int:
        self._refuse_if_closed()
        _check_state(state)
        check_metrics(metrics)
        return _whole_step(step)

    def _begin(self, ranks: Ranks, *, saving: bool = True) -> None:
        """Once: wait for writers of an earlier life, clean up after it, start the engine. Collective.

        This gives the root its identity, and so makes a root that is not there, unless nothing is to be saved yet.
        """
        storage = self.storage
        if self._leftovers is not None or not isinstance(storage, SharedStorage):
            return
        if not saving and not run_on_all_ranks(ranks, lambda: ranks.rank > 0 or storage.exists())[0]:
            return
        life = run_on_all_ranks(ranks, lambda: self._new_life(ranks, storage))[0]
        run = identify(ranks, storage)
        if not run.persistent and ranks.rank == 0:
            self._listener(Event("no identity", detail=_NO_IDENTITY.format(storage.name)))
        leftovers = Leftovers(storage, run.key, self._deadline_s)
        cleaned = leftovers.clean(ranks, self._silence_s)
        if ranks.rank == 0:
            self._tell_cleaned(cleaned)
        self._start_background(ranks, storage, run, life)
        self._leftovers = leftovers

    def _new_life(self, ranks: Ranks, storage: SharedStorage) -> str:
        if ranks.rank == 0 and not isinstance(storage, LocalStorage):
            self._refuse_checkpoint(storage)  # here, where all ranks hear of it if it does not answer
        return secrets.token_hex(8)

    def _refuse_checkpoint(self, storage: SharedStorage) -> None:
        if is_checkpoint(storage):
            raise Unsupported(f"{storage.name} is a checkpoint; a Checkpointer takes the folder above it")

    def _tell_cleaned(self, cleaned: Cleaned) -> None:
        if cleaned.attempts or cleaned.waited_s > 1:
            detail = (
                f"{cleaned.attempts} attempts that nobody held"
                if cleaned.attempts
                else "waited for writers of an earlier start"
            )
            self._listener(Event("cleaned", seconds=cleaned.waited_s, detail=detail))
        if cleaned.strangers:
            self._warnings_due.append(
                f"another run is at work under {self.storage.name} ({', '.join(cleaned.strangers)}): "
                "if both save, they replace each other's steps"
            )
        for path in cleaned.older:
            self._warnings_due.append(
                f"{path} was captured by an older version of Holdfast for a root at {self.storage.name}. It does not "
                f"say which root that was, so it is not restored; free the memory with `rm {path} {path}.card`"
            )

    def _start_background(self, ranks: Ranks, storage: SharedStorage, run: RunKey, life: str) -> None:
        from holdfast.engine.background_save import BackgroundOptions, BackgroundSaver

        options = BackgroundOptions(
            self._deadline_s,
            self._silence_s,
            self._on_busy,
            self._arena_bytes,
            self._threads,
            None if self._keep is None else self._keep.fields(),
        )
        background = BackgroundSaver(storage, self._options, options, self._listener)
        try:
            run_on_all_ranks(ranks, lambda: background.begin_run(ranks, run, life))
        except HoldfastError:
            background.close(0.0)
            raise
        self._background = background
        self._termination.install()

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        verify: bool = True,
        cast: bool = False,
        only: Sequence[str] = (),
        ignore: Sequence[str] = (),
        move_damaged: bool = False,
        progress: Callable[[int], None] = no_progress,
    ) -> int | None:
        """Load the newest good checkpoint, or the one of `step`; returns its step, None if there is none.

        A damaged checkpoint is skipped with a warning, on every rank even if only one sees the
        damage; `move_damaged` renames it to `damaged-step-N`. When all are damaged, raises
        Damaged. `last_report` tells what was loaded.

        Going back to an earlier `step` begins another branch: the first save after it sets the
        later steps aside as `abandoned-step-M`, and nothing restores or removes those by itself.

        What a crashed run had captured but not yet written is restored from memory when it is
        newer than every checkpoint, and written now.
        """
        saved = self._options
        options = LoadOptions(
            strict, verify, cast, only, ignore, saved.ties, saved.mesh, saved.mapping, reverse=saved.mapping is not None
        )
        with self._lock:
            self._refuse_if_closed()
            _check_state(state)
            asked = None if step is None else _whole_step(step)
            request = Request(asked, options, progress, self._deadline_s, move_damaged)
            found = self._restore(self._ranks(), state, request)
            self._say_warnings()
            return found

    def _restore(self, ranks: Ranks, state: MutableMapping[str, Any], request: Request) -> int | None:
        self._begin(ranks, saving=self._has_optimizer(ranks, state))
        for living in [other for other in _LIVING if other.storage.name == self.storage.name]:
            living.finish()  # this one's save in flight, or another's of this process
        self._unrestored = False
        # Where another step was asked for, what memory holds is not judged by that.
        self._keep_captured = request.step is not None
        before = None
        if self._background is not None:
            before, self._background.last_published = self._background.last_published, None
        found = self._restore_captured(ranks, state, request)
        if found is None:
            found = self._restore_stored(ranks, state, request)
        if self._background is not None and self._leftovers is not None:
            if not self._keep_captured:
                self._leftovers.drop(ranks)
            if found is None:
                self._background.last_published = before  # else the next save's parent is what was restored
            self._prepare_quietly(ranks, state)
        if found is not None and ranks.rank == 0:
            self._tell_misfits()
        return found

    def _tell_misfits(self) -> None:
        """What a load that is not strict left out, and what it changed in param groups, is said aloud."""
        report = self.last_report
        if report is not None and (report.missing or report.unexpected or report.mismatched or report.notes):
            self._warnings_due.append(str(report))

    def _restore_stored(self, ranks: Ranks, state: MutableMapping[str, Any], request: Request) -> int | None:
        catalog = None if self._leftovers is None else self._leftovers.catalog
        restored = restore_stored(ranks, self.storage, state, request, catalog)
        if restored is None:
            return None
        self.last_report = restored.report
        self._origin = restored.origin
        if ranks.rank == 0:
            if request.skipped:
                self._warnings_due.append("skipped damaged checkpoints:\n  " + "\n  ".join(request.skipped))
            if restored.origin.abandons:
                steps = ", ".join(str(step) for step, _ in restored.origin.abandons[:10])
                detail = f"the first save sets what came later aside: step {steps}"
                self._listener(Event("went back", restored.step, detail=detail))
        return restored.step

    def _restore_captured(self, ranks: Ranks, state: MutableMapping[str, Any], request: Request) -> int | None:
        """Load what a crashed run left in memory, if all of it is there and newer than what is committed."""
        if self._leftovers is None or request.step is not None:
            return None
        captured = self._leftovers.newest(ranks)
        if captured is None:
            return None
        if not captured.is_whole:
            self._keep_captured = True
            if ranks.rank == 0:
                self._warnings_due.append(
                    f"step {captured.step} was captured and not written, and the memory of this run's hosts has only "
                    "part of it: start on all the hosts that had it to restore it; it stays until the next save"
                )
            return None
        try:
            if not captured.is_here:
                self._adopt(ranks, captured)
                return None  # it is the newest checkpoint now
            checked = replace(request, options=replace(request.options, verify=True))
            report = checked.load(ranks, lambda: captured_checkpoint(captured.cards), state)
        except Mismatch as error:
            raise Mismatch(
                f"step {captured.step}, which the run before had captured in the memory of this host and not written: "
                f"{error}\nto give it up and restore the newest checkpoint instead: "
                f"`holdfast gc {shlex.quote(self.storage.name)} --memory`"
            ) from error
        except HoldfastError as error:
            self._keep_captured = not isinstance(error, Damaged)  # it may work after another start
            request.skipped.append(f"step {captured.step} in memory: {error}")
            return None
        self.last_report = report
        self._origin = captured.lineage
        after = self._write_again(ranks, captured, report, state)
        if ranks.rank == 0:
            self._listener(Event("restored", captured.step, detail="from memory"))
            self._warnings_due.append(
                f"step {captured.step} was restored from the memory of this host: the run before had captured but "
                f"not written it; {after}"
            )
        return captured.step

    def _write_again(
        self, ranks: Ranks, captured: Captured, report: LoadReport, state: MutableMapping[str, Any]
    ) -> str:
        """Save what was restored from memory; what is there stays until that is committed. Returns what was done."""

        def look() -> list[bool]:
            arenas = [Path(card.arena) for card in captured.cards]
            room = shutil.disk_usage(arenas[0].parent).free >= sum(arena.stat().st_size for arena in arenas)
            return [is_whole(report, captured_checkpoint(captured.cards)), room]

        answers = run_on_all_ranks(ranks, look)
        self._keep_captured = True
        if not all(whole for whole, _ in answers):
            return "it stays there, since not all of it was restored"
        if not all(room for _, room in answers):
            return "it stays there until the next save, since there is no room for another capture beside it"
        self._unrestored = self._keep_captured = False
        self._rewriting = self._save_now(captured.step, state, captured.lineage.metrics)
        self._keep_captured = True
        return "it is written now"

    def _adopt(self, ranks: Ranks, captured: Captured) -> None:
        assert self._leftovers is not None
        self._leftovers.adopt(ranks, captured, self._threads or min(8, os.cpu_count() or 1), self._silence_s)
        if ranks.rank == 0:
            self._listener(Event("restored", captured.step, detail="from memory"))
            self._warnings_due.append(
                f"step {captured.step} is restored from the memory of its hosts: the run before had captured but "
                "not written it; it is written now"
            )

    def _forget_rewritten(self) -> None:
        """Once what was restored from memory is committed, the memory is given back."""
        if self._rewriting is not None and self._rewriting.done() and self._rewriting.error is None:
            self._rewriting = None
            self._keep_captured = False
            if self._leftovers is not None:
                self._leftovers.forget()

    def _prepare_quietly(self, ranks: Ranks, state: MutableMapping[str, Any]) -> None:
        """Get ready for saves if this is a training state; a state that cannot be saved is told of by `save`."""
        assert self._background is not None
        try:
            if self._has_optimizer(ranks, state):
                self._background.prepare(ranks, state)
        except HoldfastError as error:
            self._listener(Event("failed", detail=f"getting ready for saves: {error}"))

    def _has_optimizer(self, ranks: Ranks, state: MutableMapping[str, Any]) -> bool:
        from holdfast.adapters.optimizer import is_optimizer

        return bool(ranks.all_max([int(any(is_optimizer(value) for value in state.values()))])[0])

    def steps(self) -> list[int]:
        """The committed steps of the living branch, oldest first."""
        return [entry.step for entry in living_steps(self.storage) if entry.manifest is not None]

    def _ranks(self) -> Ranks:
        from holdfast.adapters.comm import current_ranks

        return current_ranks(self._deadline_s)


def _check_state(state: Any) -> None:
    if not isinstance(state, MutableMapping):
        raise Unsupported(f"the state is a {type(state).__name__}: give a dict of what there is to save, by name")


def _whole_step(step: Any) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__") or operator.index(step) < 0:
        raise InvalidArgument(f"step={step!r} is not a whole number from 0 on")
    if operator.index(step) > _LAST_STEP:
        raise InvalidArgument(f"step={step!r} is beyond the last step there can be, {_LAST_STEP}")
    return operator.index(step)


def _finish(known: weakref.ref[Checkpointer], grace_s: float) -> None:
    """In a signal handler: no lock may be taken that the interrupted code holds, so it looks again and again."""
    end = time.monotonic() + grace_s
    living = known()
    while living is not None and not living.is_idle and time.monotonic() < end:
        time.sleep(_POLL_S)
    if living is not None:
        living.say_last_words(grace_s)


def _close_at_exit(checkpointer: Checkpointer) -> None:
    """Finish the save in flight when the interpreter exits, without keeping the Checkpointer alive."""
    known = weakref.ref(checkpointer)
    owner = os.getpid()

    def close() -> None:
        living = known()
        if living is not None and os.getpid() == owner:
            living.close()

    atexit.register(close)
    weakref.finalize(checkpointer, atexit.unregister, close)
