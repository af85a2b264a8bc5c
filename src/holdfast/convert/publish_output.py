"""Write a planned output to a hidden folder on all ranks and publish it; after a failure nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.destination import DestinationFolder
from holdfast.convert.sinks.base import Output
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.writer.collective_attempt import collective_attempt
from holdfast.writer.messages import SaveStarted
from holdfast.writer.startup_cleanup import clean_storage, dead_attempts, sweep_removed

_SILENCE_S = 60.0


def publish_output(
    output: Output,
    target: DestinationFolder,
    ranks: Ranks,
    write: Callable[[Attempt], Sequence[BlockReport]],
    begun: SaveStarted,
    *,
    force: bool,
) -> None:
    """Write an attempt and publish it, after dead attempts are deleted. On failure the attempt is discarded.

    Collective. `write` writes this rank's share of the tensor files, and returns the reports of all ranks.
    """
    storage = target.storage
    files = [(file.plan.name, file.plan.size) for file in output.files] if output.write is None else []

    def clean() -> None:
        if storage.exists():
            clean_storage(storage, dead_attempts(storage, _SILENCE_S))
            sweep_removed(storage)  # a replaced checkpoint may be as large as a model

    with collective_attempt(ranks, storage, target.folder, files, begun, clean) as attempt:
        reports = write(attempt)

        def publish() -> None:
            if ranks.rank == 0:
                attempt.put(output.small_files(attempt.name, reports))
                target.check_free(force=force)  # again, because writing took a while
                attempt.publish()

        run_on_all_ranks(ranks, publish)
