"""The memory tier: when captured states of earlier starts are dropped, kept or rewritten."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import StorageError
from holdfast.core.ranks import Ranks, SingleProcess
from holdfast.core.terminal import no_progress
from holdfast.core.warnings import PendingWarnings
from holdfast.engine.memory_tier import MemoryState, MemoryTier
from holdfast.engine.options import LoadOptions
from holdfast.engine.restore import RestoreRequest
from holdfast.engine.save_handle import SaveHandle

RANKS = SingleProcess()


class FakeLeftovers:
    """Leftovers without arenas: it counts what is dropped."""

    def __init__(self) -> None:
        self.dropped = 0
        self.forgotten = 0

    def newest(self, ranks: Ranks) -> None:
        return None

    def drop(self, ranks: Ranks) -> None:
        self.dropped += 1

    def forget(self) -> None:
        self.forgotten += 1


@pytest.fixture
def tier() -> tuple[MemoryTier, FakeLeftovers]:
    memory, leftovers = MemoryTier("root", PendingWarnings()), FakeLeftovers()
    memory.attach(leftovers)  # type: ignore[arg-type]
    return memory, leftovers


def request(step: int | None = None) -> RestoreRequest:
    return RestoreRequest(step, LoadOptions(), no_progress, 1.0)


def rewriting(memory: MemoryTier) -> SaveHandle:
    """Restore a state from memory, as far as its rewrite is concerned."""
    memory.begin_restore(request(1))
    memory.begin_rewrite()
    memory.drop_before_save(RANKS)  # the save of the rewrite itself
    handle = SaveHandle(1, 1.0)
    memory.set_rewrite(handle)
    return handle


def test_a_first_save_drops_what_is_there_once(tier: Any) -> None:
    memory, leftovers = tier
    assert memory.state is MemoryState.UNCLAIMED
    for _ in range(2):
        memory.drop_before_save(RANKS)
    assert leftovers.dropped == 1 and memory.state is MemoryState.DROPPED


def test_a_blocking_save_claims_the_run_and_drops_nothing(tier: Any) -> None:
    memory, leftovers = tier
    memory.claim()
    assert memory.state is MemoryState.DROPPED and leftovers.dropped == 0


def test_a_restore_drops_what_it_did_not_want(tier: Any) -> None:
    memory, leftovers = tier
    memory.begin_restore(request())
    assert memory.restore(RANKS, {}, request(), 1, 1.0) is None
    memory.end_restore(RANKS)
    assert leftovers.dropped == 1


def test_a_restore_of_a_given_step_keeps_it_until_the_next_save(tier: Any) -> None:
    memory, leftovers = tier
    memory.begin_restore(request(3))
    memory.end_restore(RANKS)
    assert memory.state is MemoryState.KEPT and leftovers.dropped == 0
    memory.drop_before_save(RANKS)
    assert leftovers.dropped == 1


def test_a_rewrite_keeps_the_copy_until_it_is_committed(tier: Any) -> None:
    memory, leftovers = tier
    handle = rewriting(memory)
    assert memory.state is MemoryState.REWRITING and leftovers.dropped == 0
    memory.free_rewritten()
    assert leftovers.forgotten == 0, "it is not committed yet"
    handle.succeed(lambda: None)  # type: ignore[arg-type,return-value]
    assert memory.keeps_unwritten
    memory.free_rewritten()
    assert leftovers.forgotten == 1 and memory.state is MemoryState.DROPPED


def test_a_rewrite_that_failed_leaves_one_copy(tier: Any) -> None:
    memory, leftovers = tier
    rewriting(memory).fail(StorageError("full"))
    assert not memory.keeps_unwritten
    memory.free_rewritten()
    assert leftovers.forgotten == 0 and memory.state is MemoryState.REWRITING


def test_the_save_after_a_rewrite_drops_the_copy(tier: Any) -> None:
    memory, leftovers = tier
    rewriting(memory)
    memory.drop_before_save(RANKS)
    assert leftovers.dropped == 1 and memory.keeps_unwritten
