"""`Checkpointer`, the public class of a run: save, save_if_due, committed, peek, restore, prepare, finish, close."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Self

from holdfast.checkpoint.catalog import living_steps
from holdfast.core import limits
from holdfast.core.errors import HoldfastError, InvalidArgument, StorageError, Unsupported
from holdfast.core.events import Event, Listener, log_event, safe_listener
from holdfast.core.ranks import Ranks, raise_on_all_ranks
from holdfast.core.warnings import PendingWarnings, warn
from holdfast.engine.caller_ranks import ranks_of_call
from holdfast.engine.extra_files import ExtraFiles
from holdfast.engine.load_report import LoadReport
from holdfast.engine.options import (
    DEADLINE_S,
    GRACE_S,
    SILENCE_S,
    BackgroundOptions,
    LoadOptions,
    SaveOptions,
    check_progress,
)
from holdfast.engine.peek import Peek
from holdfast.engine.restore import RestoreRequest
from holdfast.engine.run_engine import RunEngine, RunState
from holdfast.engine.save_handle import SaveHandle, SaveRequest, check_state, check_step
from holdfast.engine.signals import Termination, close_at_exit
from holdfast.engine.start_run import refuse_checkpoint, report_import
from holdfast.keep import Policy
from holdfast.mapping.per_module import MappingLike
from holdfast.program.model_program import Program
from holdfast.storage import Storage, storage_at
from holdfast.storage.local import LocalStorage
from holdfast.when import Occasion, Schedule

__all__ = ["Checkpointer", "SaveHandle"]

_TRIES = 3
_UNREPORTED = 1000  # saves that a program may leave without asking for them; older ones are forgotten

_LIVING: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class Checkpointer:
    """Saves and restores the steps of one run. Every rank creates one with the same root.

    `save` returns at once: the state is captured into shared memory while training continues,
    and a writer process makes it a checkpoint. A failed save does not stop training: it
    warns, emits an event, and the handle's `result()` raises.

    `keep` selects the steps to keep, such as `holdfast.keep.last(3) | holdfast.keep.every(1000)`;
    by default all. `when` selects the steps that `save_if_due` saves, such as
    `holdfast.when.steps(500) | holdfast.when.preempted()`. `on_busy` is what a save does
    while the previous one is still being written: "wait" or "skip". `arena_bytes` limits the shared
    memory of this rank. `grace_s` is how long SIGTERM waits for the save in flight.
    `on_event` is called with every event, from any thread. `mapping` defines the names and shapes
    of the live tensors in the checkpoints, as in `holdfast.save`; `restore` uses its reverse. Without one,
    `hub_keys` gives transformers models the names on the hub, unless the step that was restored has other ones.
    `only` and `ignore` are patterns of the keys that every save writes and `restore` loads. `base`, `max_shard_size`,
    `block_bytes`, `model_dtype`, `ties`, `replicas`, `mesh` and `program` are those of `holdfast.save`, too.
    `writer_threads` is how many threads of each writer process write. `deadline_s` is how long ranks wait for each
    other, and a save may take; it also fails once another rank's writer was silent for `silence_s` seconds.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        mapping: MappingLike | Mapping[str, MappingLike] | None = None,
        hub_keys: bool = True,
        max_shard_size: int | str = "5GB",
        block_bytes: int = limits.BLOCK_BYTES,
        model_dtype: str | None = None,
        ties: Mapping[str, str] | None = None,
        replicas: str = "error",
        only: Sequence[str] = (),
        ignore: Sequence[str] = (),
        mesh: Any = None,
        base: str | None = None,
        program: Program | None = None,
        keep: Policy | None = None,
        when: Occasion | None = None,
        on_busy: str = "wait",
        arena_bytes: int | str | None = None,
        writer_threads: int | None = None,
        grace_s: float = GRACE_S,
        deadline_s: float = DEADLINE_S,
        silence_s: float = SILENCE_S,
        on_event: Listener = log_event,
    ) -> None:
        options = self._options = SaveOptions(
            max_shard_size=max_shard_size,
            block_bytes=block_bytes,
            model_dtype=model_dtype,
            ties=ties or {},
            replicas=replicas,
            mesh=mesh,
            mapping=mapping,
            only=only,
            ignore=ignore,
            base=base,
            hub_keys=hub_keys,
            program=program,
        )
        options.require_reversible()
        background_options = BackgroundOptions(
            deadline_s=deadline_s, silence_s=silence_s, grace_s=grace_s, on_busy=on_busy,
            arena_bytes=arena_bytes, writer_threads=writer_threads, keep=keep,
        )  # fmt: skip
        if when is not None and not isinstance(when, Occasion):
            raise InvalidArgument(f"when={when!r} is not an occasion: write for example holdfast.when.steps(1000)")
        if not callable(on_event):
            raise InvalidArgument(f"on_event={on_event!r} cannot be called with an event")
        self.storage = storage_at(root)
        if isinstance(self.storage, LocalStorage):
            with contextlib.suppress(StorageError):  # the first save reports a root that cannot be read
                refuse_checkpoint(self.storage)
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._owner = os.getpid()
        self._lock = threading.RLock()  # calls of several threads follow each other
        self._listener = safe_listener(on_event)
        self._warnings = PendingWarnings()
        self._unreported: deque[SaveHandle] = deque(maxlen=_UNREPORTED)
        self._schedule = None if when is None else Schedule(when, grace_s=grace_s)
        self._termination = self._make_termination(grace_s)
        self._engine = RunEngine(
            self.storage, options, background_options, self._termination, self._listener, self._warnings
        )
        _LIVING.add(self)
        close_at_exit(self)

    def _make_termination(self, grace_s: float) -> Termination:
        schedule = self._schedule or Schedule(Occasion())
        termination = Termination(self._warnings, grace_s, schedule.accept_signal, schedule.signals)
        if schedule.signals and not termination.install():
            warn("signals are not received: create the Checkpointer in the main thread for when.preempted() to work")
        return termination

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_idle(self) -> bool:
        """True if no save is in flight."""
        return self._engine.is_idle

    @property
    def last_report(self) -> LoadReport | None:
        """The report of the last `restore` that loaded a state."""
        return self._engine.last_report

    @property
    def preempted(self) -> bool:
        """True once a signal has announced the end of the process and `save_if_due` has seen it on every rank."""
        return self._schedule is not None and self._schedule.preempted

    def steps(self) -> list[int]:
        """Return the committed steps of the living branch, oldest first."""
        return [entry.step for entry in living_steps(self.storage) if entry.manifest is not None]

    def finish(self, timeout: float | None = None) -> bool:
        """Wait until the save in flight has been committed or has failed; return False after `timeout` seconds.

        The write of a state that was restored from memory is waited for on rank 0.
        """
        return self._engine.wait(self._deadline_s if timeout is None else timeout)

    def prepare(self, state: MutableMapping[str, Any]) -> None:
        """Get ready in the background, so that the first save is as cheap as the tenth. Collective.

        `restore` does this when the state has an optimizer.
        """
        with self._lock:
            self._require_open()
            check_state(state)
            self._engine.prepare(self._ranks(), state)
            self._warnings.emit()

    # Save.

    def save(
        self,
        step: int,
        state: MutableMapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        files: ExtraFiles | None = None,
    ) -> SaveHandle:
        """Save the state as `step`, as it is now. Saving a committed step again replaces it, unless it is the same.

        `metrics` are numbers by name, such as {"loss": 2.31}, for `keep.best`. `files` are published with the step,
        such as a tokenizer: contents by name (bytes, text, or a `Path`), or a function that fills a
        folder, such as `tokenizer.save_pretrained`. They are read, and the function is called, before `save`
        returns: contents that stay the same cost least as bytes. Metrics and files are those of rank 0.
        """
        with self._lock:
            handle = self._save_now(self._request(step, state, metrics, files))
            self._warnings.emit()
            return handle

    def save_if_due(
        self,
        step: int,
        state: MutableMapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        files: ExtraFiles | None = None,
    ) -> SaveHandle | None:
        """Save the state if an occasion of `when` is due, else return None. Call it after every step.

        After a signal of `when.preempted`, it waits until the step is committed, for
        `grace_s` at most; `preempted` is True from then on.
        """
        if self._schedule is None:
            raise InvalidArgument("save_if_due: the Checkpointer has no schedule; pass when=holdfast.when....")
        with self._lock:
            self._require_open()
            step = check_step(step)
            before = self._schedule.preempted
            if not self._schedule.is_due(self._ranks(), step):
                return None
            request = self._request(step, state, metrics, files)
            if self._schedule.preempted and not before:
                handle = self._save_last(self._schedule, request)
            else:
                handle = self._save_now(request)
            self._warnings.emit()
            return handle

    def _request(self, step: Any, state: Any, metrics: Any, files: Any) -> SaveRequest:
        """Check the arguments of a save; files are read on rank 0 only."""
        closed = self._closed_error() if self._engine.state is RunState.CLOSED else None
        return SaveRequest.of(step, state, metrics, files if self._ranks().rank == 0 else None, closed)

    def _save_last(self, schedule: Schedule, request: SaveRequest) -> SaveHandle:
        """Save before the process ends: after the save in flight, never skipped, and up to the commit."""
        self._listener(Event("preempted", request.step))
        for _ in range(_TRIES):
            self.finish(self._grace_s)
            handle = self._save_now(request)
            if not handle.skipped:
                break
        handle.wait(self._grace_s)
        schedule.answered()
        return handle

    def _save_now(self, request: SaveRequest) -> SaveHandle:
        handle = self._engine.save(self._ranks(), request)
        if self._schedule is not None:
            self._schedule.saved(handle)
        self._unreported.append(handle)
        return handle

    def committed(self) -> list[SaveHandle]:
        """Return the saves that were committed since the last call, oldest first, on the thread that asks.

        For what needs a finished folder, such as an upload; `keep` may have removed an old one meanwhile. Not
        collective: ranks may learn of a commit at different times, so that usually rank 0 asks; after `finish()`
        all of them know. Of a program that never asks, the last 1,000 are remembered.
        """
        with self._lock:
            over = [handle for handle in self._unreported if handle.done()]
            for handle in over:
                self._unreported.remove(handle)
            return [handle for handle in over if handle.error is None and not handle.skipped]

    # Restore.

    def peek(self, *, verify: bool = False) -> Peek | None:
        """Look at the checkpoint that `restore` would take: its step, metrics and values. None if there is none.

        It needs no model: a program reads its counters and settings here before it builds one. `verify` reads
        every byte, on rank 0, so that a `restore` after it finds the same step; without it a checkpoint whose
        tensors are damaged is found, and `restore` goes back to the one before. Collective.
        """
        with self._lock:
            ranks = self._ranks()

            def check() -> RestoreRequest:
                self._require_open()
                options = LoadOptions(verify=verify, mesh=self._options.mesh)
                return RestoreRequest(None, options, None, self._deadline_s)

            request = raise_on_all_ranks(ranks, check)
            self._finish_others()
            found = self._engine.peek(ranks, request)
            self._warnings.emit()
            return found

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
        device: Any = None,
        move_damaged: bool = False,
        memory_bytes: int | str = limits.LOAD_MEMORY_BYTES,
        read_once: bool | str | Mapping[str, int | str] = "auto",
        progress: Callable[[int], None] | None = None,
    ) -> int | None:
        """Load the newest good checkpoint, or that of `step`; return its step, None if none exists.

        A damaged checkpoint is skipped with a warning, on every rank even if only one sees the
        damage; `move_damaged` renames it to `damaged-step-N`. If all are damaged, raises
        Damaged. `last_report` is the report of the load. `memory_bytes` bounds the memory that each
        rank uses beside the tensors; `device`, `read_once` and `progress` are those of
        `holdfast.load`.

        Restoring an earlier `step` begins another branch: the first save after it sets the
        later steps aside as `abandoned-step-M`, and nothing restores or removes those automatically.

        `only` and `ignore` are patterns of keys, as in `holdfast.load`. Without them those of the Checkpointer apply;
        `only` replaces the Checkpointer's, and `ignore` adds to them.

        A state that a crashed run had captured but not written is restored from memory if it is
        newer than every checkpoint, and written now.
        """

        def check() -> RestoreRequest:
            self._require_open()
            check_state(state)
            check_progress(progress)
            options = LoadOptions(
                strict=strict,
                verify=verify,
                cast=cast,
                **self._options.for_loads(only, ignore),
                device=device,
                memory_bytes=memory_bytes,
                read_once=read_once,
            )
            number = None if step is None else check_step(step)
            return RestoreRequest(number, options, progress, self._deadline_s, move_damaged)

        with self._lock:
            ranks = self._ranks()
            request = raise_on_all_ranks(ranks, check)
            self._finish_others()
            report_import(self._listener, ranks.rank)
            restored = self._engine.restore(ranks, state, request)
            self._warnings.emit()
            return restored

    def _finish_others(self) -> None:
        """Wait for the save in flight of this or another Checkpointer of the process under the same root."""
        for living in [other for other in _LIVING if other.storage.name == self.storage.name]:
            living.finish()

    def close(self, timeout: float | None = None) -> None:
        """Finish the save in flight and release the writer. A closed Checkpointer cannot save.

        After `timeout` seconds (by default the deadline) it returns without waiting further: the
        writer finishes by itself. A state that could not be written stays in the memory of
        this host until the next start under the same root.
        """
        if self._owner != os.getpid() or self._engine.state is RunState.CLOSED:
            return
        self._termination.remove()
        self._engine.close(self._deadline_s if timeout is None else timeout)
        self._warnings.emit()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Release the writer; it finishes by itself."""
        if is_finalizing():  # modules and their globals are gone; `close_at_exit` has closed it
            return
        if hasattr(self, "_engine") and self._owner == os.getpid():
            self._engine.release()

    def _require_open(self) -> None:
        if self._engine.state is RunState.CLOSED:
            raise self._closed_error()

    def _closed_error(self) -> HoldfastError:
        return Unsupported(f"the Checkpointer of {self.storage.name} is closed")

    def _ranks(self) -> Ranks:
        return ranks_of_call("a Checkpointer", self._deadline_s)
