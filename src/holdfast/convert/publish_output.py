"""Plan an output from sources, write it to a hidden folder on all ranks, publish it; a failure changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol, TypeVar

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.destination import DestinationFolder
from holdfast.convert.sinks.base import Output
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.terminal import Progress, no_progress
from holdfast.writer.collective_attempt import collective_attempt
from holdfast.writer.messages import SaveStarted
from holdfast.writer.startup_cleanup import clean_dead_attempts

Watch = Callable[[int], AbstractContextManager[Progress]]
Hold = Callable[[Checkpoint], None]


@contextmanager
def no_watch(total: int) -> Iterator[Progress]:
    """Ignore the progress."""
    yield no_progress


class PlannedOutput(Protocol):
    """An output that is planned and not yet written. `step` is None unless the output is the state of one step."""

    @property
    def output(self) -> Output: ...

    @property
    def step(self) -> int | None: ...

    def write(self, ranks: Ranks, attempt: Attempt, progress: Progress) -> Sequence[BlockReport]:
        """Write this rank's share of the tensor files. Returns the reports of all ranks."""


Planned = TypeVar("Planned", bound=PlannedOutput)


def publish_output(
    plan: Callable[[DestinationFolder, Hold], Planned],
    destination: str | os.PathLike[str],
    ranks: Ranks,
    watch: Watch,
    *,
    force: bool,
) -> tuple[Planned, DestinationFolder]:
    """Plan an output, write it and publish it. Returns the planned output and the folder that it is published as.

    `plan` opens the sources and calls `hold` with each: a source must not overlap the destination, and is not deleted
    until the output is published. `watch` is entered with the bytes to write. Collective: every rank must call it.
    """
    planned: list[tuple[Planned, DestinationFolder]] = []
    with ExitStack() as stack:

        def prepare() -> None:
            target = DestinationFolder.at(destination)

            def hold(source: Checkpoint) -> None:
                target.check(source, force=force)
                stack.enter_context(source.held())

            planned.append((plan(target, hold), target))

        run_on_all_ranks(ranks, prepare)
        prepared, target = planned[0]
        progress = stack.enter_context(watch(prepared.output.bytes))
        _write_and_publish(prepared, target, ranks, progress, force=force)
    return prepared, target


def _write_and_publish(
    planned: PlannedOutput, target: DestinationFolder, ranks: Ranks, progress: Progress, *, force: bool
) -> None:
    """Write an attempt and publish it, after dead attempts are deleted. On failure the attempt is discarded."""
    storage, output = target.storage, planned.output
    files = [(file.plan.name, file.plan.size) for file in output.files] if output.write is None else []
    begun = SaveStarted(planned.step, ranks.world, output.bytes)

    def clean() -> None:
        clean_dead_attempts(storage)

    with collective_attempt(ranks, storage, target.folder, files, begun, clean) as attempt:
        reports = planned.write(ranks, attempt, progress)

        def publish() -> None:
            if ranks.rank == 0:
                attempt.put(output.small_files(attempt.name, reports))
                target.check_free(force=force)  # again, because writing took a while
                attempt.publish()

        run_on_all_ranks(ranks, publish)
