"""The way of a blocking save: survey, plan, write, publish. Collective over all ranks."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.publish import check_replaceable, publish
from holdfast.checkpoint.writing import drop_travel_files, write_blocks
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.save_plan import plan_files
from holdfast.engine.survey import SaveOptions, Survey
from holdfast.plan.state_values import value_fields
from holdfast.storage.base import Storage
from holdfast.writer.collective_attempt import collective_attempt
from holdfast.writer.messages import SaveStarted


class Saver:
    """Saves states to one storage and waits for it; every rank takes part."""

    def __init__(self, storage: Storage, options: SaveOptions) -> None:
        self._storage = storage
        self._options = options = replace(options, whole_files=storage.whole_files)
        self._survey = Survey(options)

    def save(self, ranks: Ranks, folder: str, state: MutableMapping[str, Any], lineage: Lineage) -> Checkpoint:
        """Save the state as `folder`; every rank returns the committed checkpoint or raises the same error."""
        from holdfast.adapters.saving.live_sources import LiveSources

        seen = self._survey.take(ranks, state, f"{self._storage.name}/{folder} at step {lineage.step}")
        options = self._options
        sizes = options.max_shard_bytes, options.block_bytes
        planned = plan_files(seen.agreement, *sizes, seen.first_replica, whole_files=options.whole_files)
        values = run_on_all_ranks(ranks, lambda: value_fields(seen.told, seen.agreement.reporters, ranks.rank))
        files = [(file.name, file.size) for file in planned.plan.files]
        begun = SaveStarted(lineage.step, ranks.world, sum(size for _, size in files))
        storage = self._storage
        with collective_attempt(
            ranks, storage, folder, files, begun, lambda: check_replaceable(storage, folder)
        ) as attempt:
            sources = LiveSources(seen.collected.by_name(), planned.group_of)
            reports = write_blocks(planned.plan, ranks, attempt, sources)
            manifest, small = planned.commit(options.block_bytes).manifest(attempt.name, lineage, reports, values)

            def publish_first() -> None:
                if ranks.rank == 0:
                    drop_travel_files(planned.plan, attempt)
                    publish(attempt, manifest, small)

            run_on_all_ranks(ranks, publish_first)
        opened: list[Checkpoint] = []
        run_on_all_ranks(ranks, lambda: opened.append(Checkpoint(self._storage, folder)))
        self._survey.warn(ranks)
        return opened[0]
