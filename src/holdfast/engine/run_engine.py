"""The engine behind a Checkpointer, a state machine: start, save, restore, close, fall back to blocking saves.

The Checkpointer is its public face. Nothing here calls back into the Checkpointer: results are
returned, warnings and events are left where the Checkpointer put them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from enum import Enum
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import HoldfastError, NoArena, NotFound, PeerFailed
from holdfast.core.events import Event, Listener
from holdfast.core.names import step_folder
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import PendingWarnings
from holdfast.engine.background_save import BackgroundSaver
from holdfast.engine.blocking_save import BlockingRetention, BlockingSaver
from holdfast.engine.load_report import LoadReport
from holdfast.engine.memory_tier import MemoryState, MemoryTier, RestoredFromMemory
from holdfast.engine.options import BackgroundOptions, SaveOptions
from holdfast.engine.peek import Peek
from holdfast.engine.restore import RestoreRequest, peek_stored, restore_stored
from holdfast.engine.save_handle import InvalidCall, SaveHandle, SaveRequest
from holdfast.engine.signals import Termination
from holdfast.engine.start_run import report_older_run, start_run
from holdfast.engine.state_machine import StateMachine
from holdfast.storage.base import SharedStorage, Storage


class RunState(Enum):
    """The states of a Checkpointer."""

    NEW = "new"  # the root was not touched
    BACKGROUND = "background"  # saves return at once; a writer process is running
    BLOCKING = "blocking"  # saves wait for the commit: other processes cannot reach the storage, or no arena fits
    CLOSED = "closed"


RUN_TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.NEW: frozenset({RunState.BACKGROUND, RunState.BLOCKING, RunState.CLOSED}),
    RunState.BACKGROUND: frozenset({RunState.BLOCKING, RunState.CLOSED}),
    RunState.BLOCKING: frozenset({RunState.CLOSED}),
    RunState.CLOSED: frozenset(),
}


class RunEngine:
    """Saves and restores the steps under one root. Every rank has one; calls are collective unless they say so."""

    def __init__(
        self,
        storage: Storage,
        options: SaveOptions,
        background_options: BackgroundOptions,
        termination: Termination,
        listener: Listener,
        warnings: PendingWarnings,
    ) -> None:
        self.storage = storage
        self._options = options
        self._background_options = background_options
        self._deadline_s = background_options.deadline_s
        self._termination = termination
        self._listener = listener
        self._warnings = warnings
        self._machine = StateMachine(RunState.NEW, RUN_TRANSITIONS)
        self._blocking = BlockingSaver(storage, options)
        self._retention = BlockingRetention(storage, background_options.keep, listener)
        self._memory = MemoryTier(storage.name, warnings)
        self._origin = Lineage(None)  # the lineage of the next save
        self.background: BackgroundSaver | None = None  # set in BACKGROUND, and kept in CLOSED
        self.last_report: LoadReport | None = None

    @property
    def state(self) -> RunState:
        return self._machine.state

    @property
    def is_idle(self) -> bool:
        """True if no save is in flight. Not collective."""
        return self.background is None or self.background.is_idle

    def wait(self, timeout_s: float) -> bool:
        """Wait for the save in flight; return False if it is not over in time. Not collective."""
        return self.background is None or self.background.wait(timeout_s)

    # Start.

    def _begin(self, ranks: Ranks, *, create_root: bool = True) -> None:
        """Leave NEW: clean up after earlier starts and start the engine. Collective."""
        if self.state is not RunState.NEW:
            return
        if not isinstance(self.storage, SharedStorage):
            self._machine.move(RunState.BLOCKING)
            return
        started = start_run(
            ranks,
            self.storage,
            self._options,
            self._background_options,
            self._listener,
            self._warnings,
            create_root=create_root,
        )
        if started is None:
            return
        self.background = started.saver
        self._memory.attach(started.leftovers)
        self._termination.watch(started.saver)
        self._termination.install()
        self._machine.move(RunState.BACKGROUND)

    def _stop_background(self, ranks: Ranks, background: BackgroundSaver, error: NoArena) -> None:
        """Save in the foreground from now on: there is no memory to capture into. All ranks come here alike."""
        background.close(self._deadline_s)
        if background.last_published is not None:
            self._origin = replace(self._origin, parent=background.last_published)
        self.background = None
        self._termination.watch(None)
        self._blocking = BlockingSaver(self.storage, self._options)
        if self.last_report is not None:
            self._blocking.keep_names(self.last_report.names)
        self._machine.move(RunState.BLOCKING)
        if ranks.rank == 0:
            self._warnings.add(f"saves block until they are written from now on: {error}")

    def prepare(self, ranks: Ranks, state: MutableMapping[str, Any]) -> None:
        """Do work of the first save ahead of it."""
        self._begin(ranks)
        if self.background is not None:
            self.background.prepare(ranks, state)

    # Save.

    def save(self, ranks: Ranks, request: SaveRequest) -> SaveHandle:
        """Save a step, in the background if possible. A failure is in the handle; a wrong call raises."""
        started = time.perf_counter()
        if self.background is None or self._memory.state is not MemoryState.DROPPED:
            try:  # a wrong call must not drop what earlier starts captured
                run_on_all_ranks(ranks, request.require_valid)
            except PeerFailed as error:
                return self._failed(ranks, request, error)
        if self.background is None:
            try:
                self._begin(ranks)
            except HoldfastError as error:
                return self._failed(ranks, request, error)
        is_first = self._memory.state is MemoryState.UNCLAIMED
        if self.background is not None:
            self.background.wait_for_turn()  # SIGTERM is handled meanwhile
            self._memory.drop_before_save(ranks)
        self._memory.claim()
        with self._termination:
            handle = self._save_request(ranks, request)
        handle.stall_ms = (time.perf_counter() - started) * 1000
        if is_first and isinstance(self.storage, SharedStorage):
            report_older_run(ranks, self.storage, handle.step, self._listener)
        return handle

    def _save_request(self, ranks: Ranks, request: SaveRequest) -> SaveHandle:
        try:
            if self.background is not None:
                try:
                    return self.background.save(ranks, request, self._origin)
                except NoArena as error:
                    self._stop_background(ranks, self.background, error)
            return self._save_blocking(ranks, request)
        except InvalidCall as call:
            raise call.error from None
        except HoldfastError as error:
            return self._failed(ranks, request, error)

    def _save_blocking(self, ranks: Ranks, request: SaveRequest) -> SaveHandle:
        step = request.step
        lineage = replace(self._origin, step=step, metrics=request.metrics)
        checkpoint = self._blocking.save(ranks, step_folder(step), request.state, lineage, request.files)
        if ranks.rank == 0:
            self._listener(Event("published", step, bytes=checkpoint.manifest.total_bytes, detail="blocking"))
        self._retention.apply(ranks, step)
        self._origin = replace(self._origin, parent=step)
        handle = SaveHandle(step, self._deadline_s)
        handle.succeed(lambda: Checkpoint(self.storage, step_folder(step)))
        return handle

    def _failed(self, ranks: Ranks, request: SaveRequest, error: HoldfastError) -> SaveHandle:
        """Return the handle of a save that failed at the call: it warns, and training continues."""
        handle = SaveHandle(request.step, self._deadline_s)
        handle.fail(error)
        self._listener(Event("failed", request.step, ranks.rank, detail=str(error)))
        self._warnings.add(f"step {request.step} was not saved: {error}")
        return handle

    # Restore.

    def restore(self, ranks: Ranks, state: MutableMapping[str, Any], request: RestoreRequest) -> int | None:
        """Load a state from memory or from the newest good checkpoint; return its step, None if none exists."""
        started = time.perf_counter()
        request = replace(request, listener=self._listener)
        has_optimizer = _has_optimizer(ranks, state)
        self._begin(ranks, create_root=has_optimizer)
        self._memory.begin_restore(ranks, request)
        step = self._restore_captured(ranks, state, request)
        if step is None:
            step = self._restore_stored(ranks, state, request)
        self._report_restart(ranks, step, time.perf_counter() - started)
        if self.background is not None:
            self._memory.end_restore(ranks)
            if has_optimizer and self._memory.leaves_room:
                self._prepare_quietly(ranks, self.background, state)
        if step is not None and ranks.rank == 0 and self.last_report is not None and self.last_report.is_partial:
            self._warnings.add(f"restored step {step}{self.last_report.difference}")
        return step

    def peek(self, ranks: Ranks, request: RestoreRequest) -> Peek | None:
        """Look at what `restore` would load, from memory or from the newest good checkpoint."""
        self._begin(ranks, create_root=False)
        found = self._memory.peek(ranks, request.options.mesh, verify=request.options.verify)
        return found or peek_stored(ranks, self.storage, request, self._memory.catalog)

    def _restore_captured(self, ranks: Ranks, state: MutableMapping[str, Any], request: RestoreRequest) -> int | None:
        restored = self._memory.restore(ranks, state, request)
        if restored is None:
            return None
        self._continue_from(restored.origin, restored.report)
        self._memory.report_restored(ranks, restored)
        self._write_captured(ranks, restored)
        return restored.step

    def _write_captured(self, ranks: Ranks, restored: RestoredFromMemory) -> None:
        """Write a restored state from the memory that holds it. Training goes on meanwhile, unless saves block."""
        handle = SaveHandle(restored.step, self._deadline_s)
        if ranks.rank == 0:
            self._memory.write(restored, self.storage, handle, self._listener)
            if self.background is not None:
                self.background.follow(handle)
        if self.background is None:
            failed = ranks.rank == 0 and (not handle.wait() or handle.error is not None)
            if not ranks.all_max([int(failed)])[0]:
                self._origin = replace(self._origin, parent=restored.step)

    def _restore_stored(self, ranks: Ranks, state: MutableMapping[str, Any], request: RestoreRequest) -> int | None:
        try:
            restored = restore_stored(ranks, self.storage, state, request, self._memory.catalog)
        except NotFound as error:
            if self._memory.holds(request.step):
                raise NotFound(f"{error}; the memory of this host holds it: restore without a step takes it") from error
            raise
        if restored is None:
            return None
        self._continue_from(restored.origin, restored.report)
        if ranks.rank == 0:
            if request.skipped:
                self._warnings.add(_skipped(request, restored.step))
            if restored.origin.abandons:
                steps = ", ".join(str(step) for step, _ in restored.origin.abandons[:10])
                detail = f"the first save sets the later steps aside: step {steps}"
                self._listener(Event("went back", restored.step, detail=detail))
        return restored.step

    def _report_restart(self, ranks: Ranks, step: int | None, seconds: float) -> None:
        """Report what a restart took until here; the load has reported its own phases."""
        report = self.last_report if step is not None else None
        load_s = 0.0 if report is None else report.seconds
        self._listener(Event("discovered", step, ranks.rank, seconds=seconds - load_s))
        if report is not None and ranks.rank == 0:
            own = "what rank 0 read" if ranks.world > 1 else ""
            detail = "from memory" if step == self._memory.restored_step else report.reading or own
            self._listener(Event("restored", step, bytes=report.read_bytes, seconds=seconds, detail=detail))
        elif ranks.rank == 0:
            self._listener(Event("new run", detail=f"there is no checkpoint in {self.storage.name}"))

    def _continue_from(self, origin: Lineage, report: LoadReport) -> None:
        """Continue from a restored step: it is the parent of the next save, and its names are written further."""
        self.last_report = report
        self._origin = origin
        self._blocking.keep_names(report.names)
        if self.background is not None:
            self.background.forget_published()
            self.background.keep_names(report.names)

    def _prepare_quietly(self, ranks: Ranks, background: BackgroundSaver, state: MutableMapping[str, Any]) -> None:
        try:
            background.prepare(ranks, state)
        except HoldfastError as error:  # `save` reports a state that cannot be saved
            self._listener(Event("failed", detail=f"getting ready for saves: {error}"))

    # End.

    def close(self, timeout_s: float) -> None:
        """Finish the save in flight and release the writer. Not collective."""
        if not self._machine.move(RunState.CLOSED) or self.background is None:
            return
        if not self.background.close(timeout_s):
            self._warnings.add("the writer is still at work after close(); it finishes by itself")
        self._memory.free_written()

    def release(self) -> None:
        """Close without waiting: the writer finishes by itself. Not collective."""
        if self._machine.move(RunState.CLOSED) and self.background is not None:
            self._termination.watch(None)
            self.background.close(0.0)


def _has_optimizer(ranks: Ranks, state: MutableMapping[str, Any]) -> bool:
    from holdfast.adapters.optimizer import is_optimizer

    return any(run_on_all_ranks(ranks, lambda: any(is_optimizer(value) for value in state.values())))


def _skipped(request: RestoreRequest, step: int) -> str:
    return f"restored step {step}, and skipped damaged checkpoints:\n  " + "\n  ".join(request.skipped)
