"""A run's checkpoints: save steps under one root, restore the newest good one."""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.api import DEADLINE_S
from holdfast.core import limits
from holdfast.core.errors import (
    Damaged,
    HoldfastError,
    InvalidArgument,
    Mismatch,
    NoArena,
    NotFound,
    StorageError,
    Unsupported,
)
from holdfast.core.events import Event, Listener, guarded, log_event
from holdfast.core.notices import warn
from holdfast.core.ranks import Ranks, together
from holdfast.format.names import step_folder
from holdfast.handle import Refusal, SaveHandle
from holdfast.leftovers import Captured, Cleaned, Leftovers
from holdfast.loading import LoadOptions, LoadReport, load_checkpoint
from holdfast.persist import start
from holdfast.persist.captured import captured_checkpoint
from holdfast.persist.catalog import committed_steps
from holdfast.persist.checkpoint import Checkpoint, no_progress
from holdfast.saving import Saver
from holdfast.storage import Storage, is_checkpoint, storage_at
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage
from holdfast.survey import SaveOptions
from holdfast.termination import Termination

if TYPE_CHECKING:
    from holdfast.background import BackgroundSaver

__all__ = ["Checkpointer", "SaveHandle"]

_POLL_S = 0.02
_LIVING: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
_LAST_STEP = 2**62  # steps are compared between ranks as 64-bit numbers


@dataclass(frozen=True, slots=True)
class _Request:
    """One restore: which step, how, and what had to be skipped on the way."""

    step: int | None
    options: LoadOptions
    progress: Callable[[int], None]
    skipped: list[str] = field(default_factory=list)


class Checkpointer:
    """Saves and restores the steps of one run. Every rank makes one with the same root.

    `save` returns at once: the state is captured into shared memory while training goes on,
    and a writer process makes it a checkpoint. A failed save does not stop training: it
    warns, emits an event, and the handle's `result()` raises.

    `on_busy` says what a save does while the one before is still being written: "wait" or
    "skip". `arena_bytes` caps the shared memory that this rank may take. `grace_s` is how long
    SIGTERM waits for the save in flight. `on_event` hears of every phase, from any thread.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        max_shard_size: int | str = "5GB",
        block_bytes: int = limits.BLOCK_BYTES,
        model_dtype: str | None = None,
        ties: Mapping[str, str] | None = None,
        replicas: str = "error",
        mesh: Any = None,
        on_busy: str = "wait",
        arena_bytes: int | str | None = None,
        writer_threads: int | None = None,
        grace_s: float = 30.0,
        deadline_s: float = DEADLINE_S,
        silence_s: float = 60.0,
        on_event: Listener = log_event,
    ) -> None:
        options = SaveOptions(max_shard_size, block_bytes, model_dtype, ties or {}, replicas, mesh)
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
        self._on_busy = on_busy
        self._arena_bytes = None if arena_bytes is None else limits.parse_bytes(arena_bytes)
        self._threads = writer_threads
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._listener = guarded(on_event)
        self._owner = os.getpid()
        self._unrestored = True
        self._keep_captured = False
        self._rewriting: SaveHandle | None = None
        self._saver = Saver(self.storage, options)
        # Said at the end of a call: a warning that is made an error must not leave other ranks waiting.
        self._warnings_due: list[str] = []
        self._background: BackgroundSaver | None = None
        self._leftovers: Leftovers | None = None
        self._parent: int | None = None
        self._closed = False
        self._lock = threading.RLock()  # calls of several threads follow each other
        _LIVING.add(self)
        itself = weakref.ref(self)
        self._termination = Termination(lambda: _finish(itself, grace_s))
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
        if not self._background.close(timeout):
            self._background.warnings_due.append("the writer is still at work after close(); it finishes by itself")
        self._forget_rewritten()
        self._say_warnings()

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

    def save(self, step: int, state: MutableMapping[str, Any]) -> SaveHandle:
        """Save the state as `step`, as it is now. Saving a committed step again replaces it, unless it is the same."""
        with self._lock:
            handle = self._save_now(step, state)
            self._say_warnings()
            return handle

    def _save_now(self, step: int, state: MutableMapping[str, Any]) -> SaveHandle:
        started = time.perf_counter()
        ranks = self._ranks()
        if self._background is None:
            step = together(ranks, lambda: self._checked(step, state))[ranks.rank]
            try:
                self._begin(ranks)
            except HoldfastError as error:
                return self._not_saved(ranks, step, error)
        if self._background is not None:
            self._background.settle()  # SIGTERM is heard meanwhile
            if (self._unrestored or self._keep_captured) and self._leftovers is not None:
                self._unrestored = self._keep_captured = False
                self._rewriting = None
                self._leftovers.drop(ranks)  # the run goes on: what was captured before is not wanted
        with self._termination:
            try:
                handle = self._save(ranks, step, state)
            except Refusal as refusal:
                raise refusal.error from None
        handle.stall_ms = (time.perf_counter() - started) * 1000
        return handle

    def _save(self, ranks: Ranks, step: int, state: MutableMapping[str, Any]) -> SaveHandle:
        try:
            if self._background is not None:
                try:
                    return self._background.save(ranks, lambda: self._checked(step, state), state, self._parent)
                except NoArena as error:
                    self._stop_background(ranks, error)
            step = self._checked(step, state)
            checkpoint = self._saver.save(ranks, step_folder(step), state, step=step, parent=self._parent)
        except HoldfastError as error:
            return self._not_saved(ranks, operator.index(step), error)
        self._parent = step
        handle = SaveHandle(step, self._deadline_s)
        handle.succeed(lambda: checkpoint)
        if ranks.rank == 0:
            self._listener(Event("published", step, bytes=checkpoint.manifest.total_bytes, detail="blocking"))
        return handle

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
        self._parent = self._parent if published is None else published
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

    def _checked(self, step: Any, state: Any) -> int:
        self._refuse_if_closed()
        _check_state(state)
        return _whole_step(step)

    def _begin(self, ranks: Ranks) -> None:
        """Once: wait for writers of an earlier life, clean up after it, start the engine. Collective."""
        storage = self.storage
        if self._leftovers is not None or not isinstance(storage, SharedStorage):
            return
        run = start.run_id(storage)
        life = together(ranks, lambda: self._new_life(ranks, storage))[0]
        leftovers = Leftovers(storage, run, self._deadline_s)
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
                f"another run is at work under {self.storage.name} (process {cleaned.strangers[0]}): "
                "if both save, they replace each other's steps"
            )

    def _start_background(self, ranks: Ranks, storage: SharedStorage, run: str, life: str) -> None:
        from holdfast.background import BackgroundOptions, BackgroundSaver

        options = BackgroundOptions(self._deadline_s, self._silence_s, self._on_busy, self._arena_bytes, self._threads)
        background = BackgroundSaver(storage, self._options, options, self._listener)
        try:
            together(ranks, lambda: background.begin_run(ranks, run, life))
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
        progress: Callable[[int], None] = no_progress,
    ) -> int | None:
        """Load the newest good checkpoint, or the one of `step`; returns its step, None if there is none.

        A damaged checkpoint is skipped with a warning, on every rank even if only one sees the
        damage. When all are damaged, raises Damaged. `last_report` tells what was loaded.

        What a crashed run had captured but not yet written is restored from memory when it is
        newer than every checkpoint, and written now.
        """
        options = LoadOptions(strict, verify, cast, only, ignore, self._options.ties, self._options.mesh)
        with self._lock:
            self._refuse_if_closed()
            _check_state(state)
            request = _Request(None if step is None else _whole_step(step), options, progress)
            found = self._restore(self._ranks(), state, request)
            self._say_warnings()
            return found

    def _restore(self, ranks: Ranks, state: MutableMapping[str, Any], request: _Request) -> int | None:
        self._begin(ranks)
        for living in [other for other in _LIVING if other.storage.name == self.storage.name]:
            living.finish()  # this one's save in flight, or another's of this process
        self._unrestored = False
        self._keep_captured = (
            request.step is not None
        )  # another step was asked for: what is newer is not judged by that
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

    def _restore_stored(self, ranks: Ranks, state: MutableMapping[str, Any], request: _Request) -> int | None:
        for candidate in self._candidates(ranks, request.step, request.skipped):
            try:
                report = self._load(ranks, self._opener(candidate), state, request)
            except Damaged as error:
                if request.step is not None:
                    raise
                request.skipped.append(f"step {candidate}: {error}")
                continue
            self.last_report = report
            self._parent = candidate
            if request.skipped and ranks.rank == 0:
                self._warnings_due.append("skipped damaged checkpoints:\n  " + "\n  ".join(request.skipped))
            return candidate
        if request.step is not None:
            raise NotFound(f"{self.storage.name} has no checkpoint of step {request.step}")
        if request.skipped:
            raise Damaged(
                f"{self.storage.name}: no checkpoint is good, and the live state may hold parts of them:\n  "
                + "\n  ".join(request.skipped)
            )
        return None

    def _load(
        self, ranks: Ranks, opener: Callable[[], Checkpoint], state: MutableMapping[str, Any], request: _Request
    ) -> LoadReport:
        return load_checkpoint(ranks, opener, state, request.options, request.progress, deadline_s=self._deadline_s)

    def _restore_captured(self, ranks: Ranks, state: MutableMapping[str, Any], request: _Request) -> int | None:
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
            report = self._load(ranks, lambda: captured_checkpoint(captured.cards), state, checked)
        except Mismatch:
            raise
        except HoldfastError as error:
            self._keep_captured = not isinstance(error, Damaged)  # it may work after another start
            request.skipped.append(f"step {captured.step} in memory: {error}")
            return None
        self.last_report = report
        self._parent = captured.parent
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
            return [_is_whole(report, captured_checkpoint(captured.cards)), room]

        answers = together(ranks, look)
        self._keep_captured = True
        if not all(whole for whole, _ in answers):
            return "it stays there, since not all of it was restored"
        if not all(room for _, room in answers):
            return "it stays there until the next save, since there is no room for another capture beside it"
        self._unrestored = self._keep_captured = False
        self._rewriting = self._save_now(captured.step, state)
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

        return bool(ranks.highest([int(any(is_optimizer(value) for value in state.values()))])[0])

    def _opener(self, step: int) -> Callable[[], Checkpoint]:
        return lambda: Checkpoint(self.storage, step_folder(step))

    def _candidates(self, ranks: Ranks, step: int | None, skipped: list[str]) -> list[int]:
        """Steps to try, newest first, as rank 0 sees them: one decision for all ranks."""

        def look() -> list[Any] | None:
            if ranks.rank:
                return None
            good, bad = [], []
            for entry in reversed(committed_steps(self.storage)):
                if step not in (None, entry.step):
                    continue
                if entry.manifest is not None:
                    good.append(entry.step)
                elif entry.problem is not None and (step is not None or not entry.damaged):
                    raise entry.problem
                else:
                    bad.append(f"step {entry.step}: {entry.problem}")
            return [good, bad]

        answer = together(ranks, look)[0]
        assert answer is not None
        skipped += answer[1]
        return list(answer[0])

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return [entry.step for entry in committed_steps(self.storage) if entry.manifest is not None]

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


def _is_whole(report: LoadReport, checkpoint: Checkpoint) -> bool:
    """Whether a load took everything that a checkpoint holds."""
    plain = [entry for entry in checkpoint.state.values() if entry["kind"] not in ("optimizer", "tensors", "module")]
    return len(report.loaded) == sum(map(len, checkpoint.places.values())) and report.values >= len(plain)


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
