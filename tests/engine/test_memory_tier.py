"""The memory tier: when captured states of earlier starts are dropped, kept or written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.checkpoint.lineage import Lineage
from holdfast.core.errors import StorageError
from holdfast.core.events import Event
from holdfast.core.ranks import Ranks, SingleProcess
from holdfast.core.terminal import no_progress
from holdfast.core.warnings import PendingWarnings
from holdfast.engine import memory_tier
from holdfast.engine.memory_tier import MemoryState, MemoryTier, RestoredFromMemory
from holdfast.engine.options import LoadOptions
from holdfast.engine.restore import RestoreRequest
from holdfast.engine.save_handle import SaveHandle
from holdfast.storage.local import LocalStorage

RANKS = SingleProcess()


class FakeLeftovers:
    """Leftovers without arenas: it counts what is dropped."""

    def __init__(self) -> None:
        self.dropped = 0
        self.forgotten = 0

    def newest(self, ranks: Ranks) -> None:
        return None

    def drop(self, ranks: Ranks) -> set[int]:
        self.dropped += 1
        return {3}

    def forget(self) -> set[int]:
        self.forgotten += 1
        return set()


@pytest.fixture
def tier() -> tuple[MemoryTier, FakeLeftovers]:
    memory, leftovers = MemoryTier("root", PendingWarnings()), FakeLeftovers()
    memory.attach(leftovers)  # type: ignore[arg-type]
    return memory, leftovers


def request(step: int | None = None) -> RestoreRequest:
    return RestoreRequest(step, LoadOptions(), no_progress, 1.0)


def restored_from_memory(memory: MemoryTier, write: Callable[[], None], events: list[Event]) -> SaveHandle:
    """Restore a state from memory, as far as its write is concerned."""
    memory.begin_restore(RANKS, request())
    memory._machine.move(MemoryState.WRITING)
    handle = SaveHandle(1, 10.0)
    restored = RestoredFromMemory(1, 12, cast("Any", None), Lineage(1), write)
    memory.write(restored, LocalStorage(Path("nowhere")), handle, events.append)
    memory.end_restore(RANKS)
    return handle


def test_a_first_save_drops_what_is_there_once(tier: Any) -> None:
    memory, leftovers = tier
    assert memory.state is MemoryState.UNCLAIMED
    for _ in range(2):
        memory.drop_before_save(RANKS)
    assert leftovers.dropped == 1 and memory.state is MemoryState.DROPPED
    with pytest.warns(match="step 3, which an earlier start had captured"):
        memory._warnings.emit()


def test_a_blocking_save_claims_the_run_and_drops_nothing(tier: Any) -> None:
    memory, leftovers = tier
    memory.claim()
    assert memory.state is MemoryState.DROPPED and leftovers.dropped == 0


def test_a_restore_drops_what_it_did_not_want(tier: Any) -> None:
    memory, leftovers = tier
    memory.begin_restore(RANKS, request())
    assert memory.restore(RANKS, {}, request()) is None
    memory.end_restore(RANKS)
    assert leftovers.dropped == 1


def test_a_restore_of_a_given_step_keeps_it_until_the_next_save(tier: Any) -> None:
    memory, leftovers = tier
    memory.begin_restore(RANKS, request(3))
    memory.end_restore(RANKS)
    assert memory.state is MemoryState.KEPT and leftovers.dropped == 0
    memory.drop_before_save(RANKS)
    assert leftovers.dropped == 1


def test_a_restored_state_is_dropped_by_its_writers(tier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, leftovers = tier
    monkeypatch.setattr(memory_tier, "Checkpoint", lambda storage, folder: folder)
    go, events = threading.Event(), []
    handle = restored_from_memory(memory, lambda: require(go.wait(10)), events)
    memory.drop_before_save(RANKS)  # a save that is skipped: the state is still being written
    assert not handle.done() and (leftovers.dropped, leftovers.forgotten) == (0, 0)
    go.set()
    assert handle.result(10) == "step-000000000001" and [(event.name, event.bytes) for event in events] == [
        ("published", 12)
    ]
    for _ in range(2):
        memory.free_written()
    assert (leftovers.dropped, leftovers.forgotten) == (0, 1), "what else was left goes with it"


def require(true: bool) -> None:
    assert true


def test_a_restored_state_that_cannot_be_written_stays_until_the_next_save(tier: Any) -> None:
    memory, leftovers = tier

    def fail() -> None:
        raise StorageError("full")

    events: list[Event] = []
    handle = restored_from_memory(memory, fail, events)
    assert handle.wait(10) and isinstance(handle.error, StorageError) and events[0].name == "failed"
    memory.free_written()
    memory.begin_restore(RANKS, request())
    memory.end_restore(RANKS)
    assert (leftovers.dropped, leftovers.forgotten) == (0, 0), "the only copy"
    memory.drop_before_save(RANKS)
    assert (leftovers.dropped, leftovers.forgotten) == (1, 1)
