"""A blocking save, collective: survey, plan, write, commit; and retention after the blocking saves of a run.

    survey   Surveyor        -> Survey           the state of every rank, and the layout that all agreed on
    plan     plan_checkpoint -> CheckpointPlan   files, blocks, and which rank writes which block
    write    write_blocks    -> [BlockReport]    every rank writes its blocks into a hidden attempt folder
    commit   publish         -> Checkpoint       rank 0 writes the manifest and renames the folder

background_save.py shares the survey and the plan. Its writer processes do the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from holdfast.checkpoint import retention
from holdfast.checkpoint.attempt import Attempt, check_replaceable, publish
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.live_blocks import drop_travel_files, write_blocks
from holdfast.checkpoint.retention import RetentionIndex
from holdfast.core.collector import paused_collector
from holdfast.core.errors import HoldfastError
from holdfast.core.events import Event, Listener
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.checkpoint_plan import CheckpointPlan, plan_checkpoint
from holdfast.engine.extra_files import ExtraFileEncoder
from holdfast.engine.options import SaveOptions
from holdfast.engine.program_save import ProgramEncoder
from holdfast.engine.survey import Survey, Surveyor
from holdfast.keep import Policy
from holdfast.plan.state_values import value_fields
from holdfast.storage.base import Storage, Tracked
from holdfast.writer.collective_attempt import collective_attempt
from holdfast.writer.messages import SaveStarted


class BlockingSaver:
    """Saves states to one storage and waits for the commit; every rank takes part."""

    def __init__(self, storage: Storage, options: SaveOptions) -> None:
        self._storage = storage
        self._options = options = replace(options, whole_files=storage.whole_files)
        self._surveyor = Surveyor(options)
        self._program = None if options.program is None else ProgramEncoder(options.program)

    def keep_names(self, names: Mapping[str, str]) -> None:
        """Write modules under these names: see `Surveyor.keep_names`."""
        self._surveyor.keep_names(names)

    @paused_collector()
    def save(
        self,
        ranks: Ranks,
        folder: str,
        state: MutableMapping[str, Any],
        lineage: Lineage,
        files: Mapping[str, bytes] | None = None,
    ) -> Checkpoint:
        """Save the state as `folder`; every rank returns the committed checkpoint or raises the same error.

        `files` are published with it; those of rank 0.
        """
        survey = self._surveyor.survey(ranks, state, f"{self._storage.name}/{folder} at step {lineage.step}")
        plan = plan_checkpoint(survey.agreement, self._options, survey.first_replica)
        values = run_on_all_ranks(ranks, lambda: value_fields(survey.values, survey.agreement.reporters, ranks.rank))
        with self._attempt(ranks, folder, plan, lineage) as attempt:
            if self._program is not None:
                self._add_program(ranks, survey, values)
            if files and ranks.rank == 0:  # which publishes; other ranks need no bytes of these
                values[0] |= value_fields(ExtraFileEncoder().values(files), {}, 0)
            reports = self._write(ranks, attempt, plan, survey)
            self._commit(ranks, attempt, plan, survey, lineage, reports, values)
        checkpoint = self._open(ranks, folder)
        self._surveyor.warn(ranks)
        return checkpoint

    def _add_program(self, ranks: Ranks, survey: Survey, values: list[dict[str, Any]]) -> None:
        """Add the files of the program to the values of rank 0; every rank raises if it is of another model."""

        def encode() -> None:
            if ranks.rank == 0 and self._program is not None:
                encoded = self._program.values(survey.agreement, self._surveyor.stored_keys)
                values[0] |= value_fields(encoded, {}, 0)

        run_on_all_ranks(ranks, encode)

    def _attempt(
        self, ranks: Ranks, folder: str, plan: CheckpointPlan, lineage: Lineage
    ) -> AbstractContextManager[Attempt]:
        """Create the attempt's folder and files on rank 0; a failure discards them."""
        storage = self._storage
        files = [(file.name, file.size) for file in plan.save.files]
        started = SaveStarted(lineage.step, ranks.world, sum(size for _, size in files))
        return collective_attempt(ranks, storage, folder, files, started, lambda: check_replaceable(storage, folder))

    def _write(self, ranks: Ranks, attempt: Attempt, plan: CheckpointPlan, survey: Survey) -> list[BlockReport]:
        """Write this rank's blocks; return the reports of all ranks."""
        from holdfast.adapters.saving.collect import LiveSources

        return write_blocks(plan.save, ranks, attempt, LiveSources(survey.collected.by_name(), plan.group_of))

    def _commit(
        self,
        ranks: Ranks,
        attempt: Attempt,
        plan: CheckpointPlan,
        survey: Survey,
        lineage: Lineage,
        reports: list[BlockReport],
        values: list[dict[str, Any]],
    ) -> None:
        """Write the manifest on rank 0 and rename the attempt: from then on the checkpoint exists."""
        commit = plan.commit(self._options.block_bytes, survey.layout.mappings)
        manifest, small = commit.manifest(attempt.name, lineage, reports, values)

        def publish_attempt() -> None:
            if ranks.rank == 0:
                drop_travel_files(plan.save, attempt)
                publish(attempt, manifest, small)

        run_on_all_ranks(ranks, publish_attempt)

    def _open(self, ranks: Ranks, folder: str) -> Checkpoint:
        opened: list[Checkpoint] = []
        run_on_all_ranks(ranks, lambda: opened.append(Checkpoint(self._storage, folder)))
        return opened[0]


class BlockingRetention:
    """Retention after the blocking saves of a run. In the background, rank 0's writer does this."""

    def __init__(self, storage: Storage, keep: Policy | None, listener: Listener) -> None:
        self._storage = storage
        self._keep = keep
        self._listener = listener
        self._index: RetentionIndex | None = None

    def apply(self, ranks: Ranks, step: int) -> None:
        """Remove the checkpoints that no policy keeps, on rank 0. Collective."""
        run_on_all_ranks(ranks, lambda: self._apply(step) if ranks.rank == 0 else None)

    def _apply(self, step: int) -> None:
        self._index = self._index or RetentionIndex(self._storage)
        for event in retention.apply(self._storage, self._keep, step, self._index).events(step):
            self._listener(event)
        try:
            if isinstance(self._storage, Tracked):
                self._storage.sweep_some()
            else:
                self._storage.sweep()
        except (HoldfastError, OSError) as error:  # the step is committed: the next save tries again
            self._listener(Event("failed", step, detail=f"deleting what was removed: {error}"))
