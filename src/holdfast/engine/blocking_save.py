"""The way of a blocking save: survey, plan, write, publish. Collective over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.publish import begin, new_attempt, publish
from holdfast.checkpoint.writing import drop_travel_files, write_blocks
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.save_plan import plan_files
from holdfast.engine.survey import SaveOptions, Survey
from holdfast.format.manifest import Manifest
from holdfast.plan.save import SavePlan
from holdfast.plan.state_values import value_fields
from holdfast.storage.base import SharedStorage, Storage
from holdfast.writer.heartbeat import heartbeat
from holdfast.writer.messages import SaveStarted


class Saver:
    """Saves states to one storage and waits for it; every rank takes part."""

    def __init__(self, storage: Storage, options: SaveOptions) -> None:
        self._storage = storage
        self._options = options = replace(options, whole_files=storage.whole_files)
        self._survey = Survey(options)
        self._stack = ExitStack()  # what shows others that a save is in flight

    def save(self, ranks: Ranks, folder: str, state: MutableMapping[str, Any], lineage: Lineage) -> Checkpoint:
        """Save the state as `folder`; every rank returns the committed checkpoint or raises the same error."""
        from holdfast.adapters.saving.live_sources import LiveSources

        seen = self._survey.take(ranks, state, f"{self._storage.name}/{folder} at step {lineage.step}")
        options = self._options
        sizes = options.max_shard_bytes, options.block_bytes
        planned = plan_files(seen.agreement, *sizes, seen.first_replica, whole_files=options.whole_files)
        values = run_on_all_ranks(ranks, lambda: value_fields(seen.told, seen.agreement.reporters, ranks.rank))
        attempt = self._begin(ranks, folder, planned.plan, lineage.step)
        try:
            sources = LiveSources(seen.collected.by_name(), planned.group_of)
            reports = write_blocks(planned.plan, ranks, self._storage, attempt, sources)
            manifest, small = planned.commit(options.block_bytes).manifest(attempt, lineage, reports, values)
            run_on_all_ranks(ranks, lambda: self._publish(ranks, attempt, folder, manifest, small, planned.plan))
        except BaseException:
            if ranks.rank == 0:
                self._storage.discard(attempt)
            raise
        finally:
            self._stack.close()
        opened: list[Checkpoint] = []
        run_on_all_ranks(ranks, lambda: opened.append(Checkpoint(self._storage, folder)))
        self._survey.warn(ranks)
        return opened[0]

    def _begin(self, ranks: Ranks, folder: str, plan: SavePlan, step: int | None) -> str:
        """Rank 0 makes the attempt's folder and files; the others learn its name."""
        attempt = new_attempt()

        def work() -> str | None:
            if ranks.rank:
                return None
            files = [(file.name, file.size) for file in plan.files]
            if isinstance(self._storage, SharedStorage):
                begun = SaveStarted(step, ranks.world, sum(size for _, size in files))
                self._stack.enter_context(heartbeat(self._storage, attempt, begun))
            begin(self._storage, attempt, folder, files)
            return attempt

        try:
            return str(run_on_all_ranks(ranks, work)[0])
        except BaseException:
            if ranks.rank == 0:
                self._storage.discard(attempt)
            self._stack.close()
            raise

    def _publish(
        self, ranks: Ranks, attempt: str, folder: str, manifest: Manifest, small: Mapping[str, bytes], plan: SavePlan
    ) -> None:
        if ranks.rank:
            return
        drop_travel_files(plan, self._storage, attempt)
        publish(self._storage, attempt, folder, manifest, small)
