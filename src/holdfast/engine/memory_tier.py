"""Restore of a state that an earlier start captured and never wrote: load it, save it again, then drop it.

`restore` loads it if it is newer than every checkpoint. It then stays in memory until it is written.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import Damaged, HoldfastError, Mismatch
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import PendingWarnings
from holdfast.engine.load_report import LoadReport
from holdfast.engine.recovery import Captured, Leftovers
from holdfast.engine.restore import RestoreRequest, is_complete
from holdfast.engine.save_handle import SaveHandle
from holdfast.engine.state_machine import StateMachine
from holdfast.writer.captured_checkpoint import captured_checkpoint


class MemoryState(Enum):
    """The fate of captured states that earlier starts left in memory."""

    UNCLAIMED = "unclaimed"  # nothing was restored or saved yet; the first save drops them
    KEPT = "kept"  # a restore could not use them; the next save drops them
    REWRITING = "rewriting"  # one was restored and is being written; dropped when that is committed
    DROPPED = "dropped"


MEMORY_TRANSITIONS: Mapping[MemoryState, frozenset[MemoryState]] = {
    MemoryState.UNCLAIMED: frozenset({MemoryState.KEPT, MemoryState.DROPPED}),
    MemoryState.KEPT: frozenset({MemoryState.KEPT, MemoryState.REWRITING, MemoryState.DROPPED}),
    MemoryState.REWRITING: frozenset({MemoryState.KEPT, MemoryState.DROPPED}),
    MemoryState.DROPPED: frozenset({MemoryState.KEPT, MemoryState.DROPPED}),
}


@dataclass(frozen=True, slots=True)
class RestoredFromMemory:
    """A captured state that was loaded; `rewrite` asks the caller to save it now."""

    step: int
    report: LoadReport
    origin: Lineage
    rewrite: bool
    outlook: str  # what becomes of the copy in memory


class MemoryTier:
    """One rank's view of the captured states of earlier starts. `attach` comes before any of them is used."""

    def __init__(self, storage_name: str, warnings: PendingWarnings) -> None:
        self._storage_name = storage_name
        self.restored_step: int | None = None
        self._warnings = warnings
        self._machine = StateMachine(MemoryState.UNCLAIMED, MEMORY_TRANSITIONS)
        self._leftovers: Leftovers | None = None
        self._rewriting: SaveHandle | None = None

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
        """Drop what earlier starts captured: the run continues without it. Collective.

        The save that rewrites a restored state keeps the copy in memory.
        """
        is_rewrite = self.state is MemoryState.REWRITING and self._rewriting is None
        if self.state is MemoryState.DROPPED or is_rewrite:
            return
        self._machine.move(MemoryState.DROPPED)
        self._rewriting = None
        if self._leftovers is not None:
            self._leftovers.drop(ranks)

    def begin_restore(self, request: RestoreRequest) -> None:
        """Keep the captured states if a given step is restored: that does not judge them."""
        self.restored_step = None
        self._machine.move(MemoryState.DROPPED if request.step is None else MemoryState.KEPT)

    def restore(
        self, ranks: Ranks, state: MutableMapping[str, Any], request: RestoreRequest, threads: int, silence_s: float
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
            if not captured.is_here:
                self._leftovers.adopt(ranks, captured, threads, silence_s)
                self._report_adopted(ranks, captured)
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
        return self._plan_rewrite(ranks, captured, report)

    def _report_adopted(self, ranks: Ranks, captured: Captured) -> None:
        self.restored_step = captured.step
        if ranks.rank == 0:
            self._warnings.add(
                f"step {captured.step} is restored from the memory of its hosts: the run before had captured but "
                "not written it; it is written now"
            )

    def report_restored(self, ranks: Ranks, restored: RestoredFromMemory) -> None:
        """Report a state that was restored from the memory of this host."""
        self.restored_step = restored.step
        if ranks.rank == 0:
            self._warnings.add(
                f"step {restored.step} was restored from the memory of this host: the run before had captured but "
                f"not written it; {restored.outlook}"
            )

    def _plan_rewrite(self, ranks: Ranks, captured: Captured, report: LoadReport) -> RestoredFromMemory:
        """Decide on all ranks whether the restored state can be saved while its copy stays in memory."""

        def check() -> list[bool]:
            arenas = [Path(card.arena) for card in captured.cards]
            has_room = shutil.disk_usage(arenas[0].parent).free >= sum(arena.stat().st_size for arena in arenas)
            return [is_complete(report, captured_checkpoint(captured.cards)), has_room]

        answers = run_on_all_ranks(ranks, check)
        self._machine.move(MemoryState.KEPT)
        rewrite = False
        if not all(complete for complete, _ in answers):
            outlook = "it stays there, since not all of it was restored"
        elif not all(has_room for _, has_room in answers):
            outlook = "it stays there until the next save, since there is no room for another capture beside it"
        else:
            outlook, rewrite = "it is written now", True
        return RestoredFromMemory(captured.step, report, captured.lineage, rewrite, outlook)

    def begin_rewrite(self) -> None:
        """Announce the save of a restored state; `set_rewrite` follows with its handle."""
        self._machine.move(MemoryState.REWRITING)
        self._rewriting = None

    def set_rewrite(self, handle: SaveHandle) -> None:
        self._rewriting = handle

    def end_restore(self, ranks: Ranks) -> None:
        """Drop the captured states that are not kept. Collective."""
        if self.state is MemoryState.DROPPED and self._leftovers is not None:
            self._leftovers.drop(ranks)

    @property
    def keeps_unwritten(self) -> bool:
        """Return True if a state that could not be written should stay in memory.

        A restored state whose rewrite failed is still in memory: a second copy is of no use.
        """
        return self._rewriting is None or self._rewriting.error is None

    def free_rewritten(self) -> None:
        """Free the copy in memory once the restored state is committed. Not collective."""
        if self._rewriting is not None and self._rewriting.done() and self._rewriting.error is None:
            self._rewriting = None
            self._machine.move(MemoryState.DROPPED)
            if self._leftovers is not None:
                self._leftovers.forget()
