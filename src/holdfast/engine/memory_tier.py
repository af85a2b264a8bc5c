"""Restore of a state that an earlier start captured and never wrote: load it, have it written, then drop it.

`restore` loads it if it is newer than every checkpoint. It is then written from the same memory, which
is freed once that is committed.
"""

from __future__ import annotations

import shlex
import shutil
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import Damaged, HoldfastError, Mismatch, error_from_record, error_record
from holdfast.core.events import Event, Listener
from holdfast.core.names import step_folder
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import PendingWarnings
from holdfast.engine.load_report import LoadReport
from holdfast.engine.peek import Peek, peek_at
from holdfast.engine.recovery import Captured, Leftovers
from holdfast.engine.restore import RestoreRequest
from holdfast.engine.save_handle import SaveHandle
from holdfast.engine.state_machine import StateMachine
from holdfast.storage.base import Storage
from holdfast.writer.captured_checkpoint import captured_checkpoint


class MemoryState(Enum):
    """The fate of captured states that earlier starts left in memory."""

    UNCLAIMED = "unclaimed"  # nothing was restored or saved yet; the first save drops them
    KEPT = "kept"  # a restore could not use them; the next save drops them
    WRITING = "writing"  # one was restored and is being written; its writers free it
    DROPPED = "dropped"


MEMORY_TRANSITIONS: Mapping[MemoryState, frozenset[MemoryState]] = {
    MemoryState.UNCLAIMED: frozenset({MemoryState.KEPT, MemoryState.DROPPED}),
    MemoryState.KEPT: frozenset({MemoryState.KEPT, MemoryState.WRITING, MemoryState.DROPPED}),
    MemoryState.WRITING: frozenset({MemoryState.KEPT, MemoryState.DROPPED}),
    MemoryState.DROPPED: frozenset({MemoryState.KEPT, MemoryState.WRITING, MemoryState.DROPPED}),
}


@dataclass(frozen=True, slots=True)
class RestoredFromMemory:
    """A captured state that was loaded; `write` writes it, on rank 0."""

    step: int
    bytes: int
    report: LoadReport
    origin: Lineage
    write: Callable[[], None]


class MemoryTier:
    """One rank's view of the captured states of earlier starts. `attach` comes before any of them is used."""

    def __init__(self, storage_name: str, warnings: PendingWarnings) -> None:
        self._storage_name = storage_name
        self.restored_step: int | None = None
        self.leaves_room = True  # for another capture beside the one that was restored, on every rank
        self._warnings = warnings
        self._machine = StateMachine(MemoryState.UNCLAIMED, MEMORY_TRANSITIONS)
        self._leftovers: Leftovers | None = None
        self._written: SaveHandle | None = None  # of the state that was restored, on rank 0

    @property
    def state(self) -> MemoryState:
        return self._machine.state

    @property
    def catalog(self) -> Catalog | None:
        """The catalog of the root's steps since the start, on rank 0."""
        return None if self._leftovers is None else self._leftovers.catalog

    def attach(self, leftovers: Leftovers) -> None:
        self._leftovers = leftovers

    def claim(self) -> None:
        """Leave the start: from now on a save does not report steps of another run."""
        if self.state is MemoryState.UNCLAIMED:
            self._machine.move(MemoryState.DROPPED)

    def drop_before_save(self, ranks: Ranks) -> None:
        """Drop what earlier starts captured: the run continues without it. Collective unless one is being written."""
        self.free_written(superseded=True)
        if self.state is MemoryState.WRITING:
            self._machine.move(MemoryState.DROPPED)  # by its writers, or in a later save
        elif self.state is not MemoryState.DROPPED:
            self._machine.move(MemoryState.DROPPED)
            for step in sorted(self._leftovers.drop(ranks)) if self._leftovers is not None else ():
                self._warnings.add(
                    f"step {step}, which an earlier start had captured in memory and not written, was discarded: this "
                    "run has saved without restoring it"
                )

    def begin_restore(self, ranks: Ranks, request: RestoreRequest) -> None:
        """Keep the captured states if a given step is restored: that does not judge them. Collective.

        A restored state that could not be written is kept, too.
        """
        self.restored_step = None
        self.leaves_room = True
        unwritten = self._written is not None and (not self._written.done() or self._written.error is not None)
        is_kept = request.step is not None or ranks.all_max([int(unwritten)])[0]
        self._machine.move(MemoryState.KEPT if is_kept else MemoryState.DROPPED)

    def peek(self, ranks: Ranks, mesh: Any, *, verify: bool) -> Peek | None:
        """Look at the captured state that `restore` would load; None if it would load none. Collective.

        A state that is spread over several hosts is written first, as in `restore`: it is the newest checkpoint then.
        """
        captured = None if self._leftovers is None else self._leftovers.newest(ranks)
        if captured is None or not captured.is_whole:
            return None
        try:
            if self._adopt_spread(ranks, captured):
                return None
            return peek_at(ranks, lambda: captured_checkpoint(captured.cards), mesh, verify=verify)
        except HoldfastError:
            return None  # `restore` says why, and takes the newest checkpoint

    def restore(
        self, ranks: Ranks, state: MutableMapping[str, Any], request: RestoreRequest
    ) -> RestoredFromMemory | None:
        """Load the newest captured state, if it is complete and newer than every checkpoint. Collective.

        Return None if none exists. A state that is spread over several hosts is written from their
        memory instead: it is then the newest checkpoint.
        """
        if self._leftovers is None or request.step is not None:
            return None
        captured = self._leftovers.newest(ranks)
        if captured is None:
            return None
        if not captured.is_whole:
            self._machine.move(MemoryState.KEPT)
            if ranks.rank == 0:
                self._warnings.add(
                    f"step {captured.step} was captured and not written, and the memory of this run's hosts has only "
                    "part of it: start on all the hosts that had it to restore it; it stays until the next save"
                )
            return None
        try:
            if self._adopt_spread(ranks, captured):
                return None
            checked = replace(request, options=replace(request.options, verify=True))
            report = checked.load(ranks, lambda: captured_checkpoint(captured.cards), state)
        except Mismatch as error:
            raise Mismatch(
                f"step {captured.step}, which the run before had captured in the memory of this host and not written: "
                f"{error}\nto discard it and restore the newest checkpoint instead: "
                f"`holdfast gc {shlex.quote(self._storage_name)} --memory`"
            ) from error
        except HoldfastError as error:
            if not isinstance(error, Damaged):
                self._machine.move(MemoryState.KEPT)  # another start may be able to load it
            request.skipped.append(f"step {captured.step} in memory: {error}")
            return None
        self.leaves_room = all(run_on_all_ranks(ranks, lambda: _leaves_room(captured)))
        self._machine.move(MemoryState.WRITING)
        write = partial(self._leftovers.write, captured)
        return RestoredFromMemory(captured.step, captured.bytes, report, captured.lineage, write)

    def _adopt_spread(self, ranks: Ranks, captured: Captured) -> bool:
        """Write a state that is spread over several hosts: it is the newest checkpoint then. Collective."""
        if captured.is_here or self._leftovers is None:
            return False
        self._leftovers.adopt(ranks, captured)
        self.restored_step = captured.step
        if ranks.rank == 0:
            self._warnings.add(
                f"step {captured.step} is restored from the memory of its hosts: the run before had captured but "
                "not written it; it is written now"
            )
        return True

    def report_restored(self, ranks: Ranks, restored: RestoredFromMemory) -> None:
        """Report a state that was restored from the memory of this host."""
        self.restored_step = restored.step
        if ranks.rank == 0:
            self._warnings.add(
                f"step {restored.step} was restored from the memory of this host: the run before had captured but "
                "not written it; it is written now"
            )

    def write(self, restored: RestoredFromMemory, storage: Storage, handle: SaveHandle, listener: Listener) -> None:
        """Write a restored state on a thread, from the memory that holds it. On rank 0."""
        self._written = handle
        arguments = (restored, storage, handle, listener)
        threading.Thread(target=self._write, args=arguments, name="holdfast-memory", daemon=True).start()

    def _write(self, restored: RestoredFromMemory, storage: Storage, handle: SaveHandle, listener: Listener) -> None:
        started = time.perf_counter()
        try:
            restored.write()
        except Exception as error:  # noqa: BLE001  (saves wait for this one, whatever failed)
            failure = error_from_record(error_record(error))
            self._warnings.add(
                f"step {restored.step}, restored from memory, was not saved: {failure}; it stays in memory"
            )
            listener(Event("failed", restored.step, detail=str(failure)))
            handle.fail(failure)
            return
        handle.seconds = time.perf_counter() - started
        listener(Event("published", restored.step, bytes=restored.bytes, seconds=handle.seconds, detail="from memory"))
        handle.succeed(lambda: Checkpoint(storage, step_folder(restored.step)))

    def holds(self, step: int | None) -> bool:
        """Return True if the memory of this host holds a step. Not collective."""
        return self._leftovers is not None and step in self._leftovers.steps()

    def end_restore(self, ranks: Ranks) -> None:
        """Drop the captured states that are not kept. Collective."""
        if self.state is MemoryState.DROPPED and self._leftovers is not None:
            self._leftovers.drop(ranks)

    def free_written(self, *, superseded: bool = False) -> None:
        """Free the memory of a restored state that was written, or that a save has `superseded`. Not collective."""
        if self._written is not None and self._written.done() and (superseded or self._written.error is None):
            self._written = None
            if self._leftovers is not None:
                self._leftovers.forget()


def _leaves_room(captured: Captured) -> bool:
    arenas = [Path(card.arena) for card in captured.cards]
    return shutil.disk_usage(arenas[0].parent).free >= sum(arena.stat().st_size for arena in arenas)
