"""An attempt that all ranks write together and wait for: a blocking save or a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from holdfast.checkpoint.attempt import Attempt, new_attempt
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.storage.base import SharedStorage, Storage
from holdfast.writer.mailbox import heartbeat
from holdfast.writer.messages import SaveStarted


@contextmanager
def collective_attempt(
    ranks: Ranks,
    storage: Storage,
    folder: str,
    files: Sequence[tuple[str, int]],
    begun: SaveStarted,
    prepare: Callable[[], None],
) -> Iterator[Attempt]:
    """Create an attempt on rank 0 and yield it on every rank, with heartbeats; discard it on failure. Collective.

    `prepare` runs on rank 0 first, and raises if the attempt must not begin.
    """
    own = Attempt(storage, new_attempt(), folder)
    with ExitStack() as stack:

        def create() -> str | None:
            if ranks.rank:
                return None
            prepare()
            if isinstance(storage, SharedStorage):
                stack.enter_context(heartbeat(storage, own.name, begun))
            own.create(files)
            return own.name

        try:
            yield Attempt(storage, str(run_on_all_ranks(ranks, create)[0]), folder)
        except BaseException:
            if ranks.rank == 0:
                own.discard()
            raise
