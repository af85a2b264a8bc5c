"""Background saves, phase by phase, with a writer that does what the test says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.run_identity import RunKey
from holdfast.core.errors import NoArena, PeerFailed, StorageError
from holdfast.core.events import Event
from holdfast.core.names import step_folder
from holdfast.core.ranks import SingleProcess
from holdfast.core.warnings import PendingWarnings
from holdfast.engine import flight as flight_module
from holdfast.engine.background_save import BackgroundSaver
from holdfast.engine.flight import Flight, FlightState, RunSession
from holdfast.engine.options import BackgroundOptions, SaveOptions
from holdfast.engine.planner import PlanState
from holdfast.engine.save_handle import InvalidCall, SaveHandle, SaveRequest
from holdfast.storage.local import LocalStorage
from holdfast.writer.arena_card import card_path
from holdfast.writer.messages import Failure, Outcome, SaveEnded, WriterGone
from tests.engine.ranks import ThreadRanks, on_ranks


class FakeWriter:
    """A writer end without a process: it records messages, and the test sends the answers."""

    made: list[FakeWriter] = []  # noqa: RUF012  (cleared by the fixture)

    def __init__(self, receive: Callable[[Any, Any], None]) -> None:
        self._receive = receive
        self.messages: list[str] = []
        self.orders: list[Any] = []
        self.threads: list[int] = []
        self.stalls: list[float] = []
        self.arenas: list[str] = []
        self.dead = False
        FakeWriter.made.append(self)

    def _note(self, name: str) -> None:
        if self.dead:
            raise PeerFailed("the writer process is gone")
        self.messages.append(name)

    def alive(self) -> bool:
        return not self.dead

    def assign(self, assignment: Any) -> None:
        self._note("plan")
        self.threads.append(assignment.threads)

    def add_arena(self, path: str) -> None:
        self.arenas.append(path)
        self._note("arena")

    def delete_arenas(self) -> None:
        """Delete the arenas, as the writer process does when its trainer has gone."""
        for path in self.arenas:
            for file in (path, card_path(path)):
                Path(file).unlink(missing_ok=True)

    def order(self, order: Any) -> None:
        self._note("order")
        self.orders.append(order)

    def captured(self, attempt: str, values: bytes, stall_ms: float) -> None:
        self._note("captured")
        self.stalls.append(stall_ms)

    def abandon(self, attempt: str, failure: Exception) -> None:
        self._note("abandon")

    def kill(self) -> None:
        self.dead = True

    def close(self, timeout_s: float) -> bool:
        return True

    def conclude(self, error: Exception | None = None, kept: bool = False) -> None:
        """Send the outcome of the last order."""
        outcome = Outcome(None if error is None else Failure.of(error))
        self._receive(self, SaveEnded(self.orders[-1].attempt, outcome, kept))

    def die(self) -> None:
        self.dead = True
        self._receive(self, WriterGone("exit code 9"))


class Bench:
    """A saver of a single process under test."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.events: list[Event] = []
        self.warnings = PendingWarnings()
        session = RunSession(LocalStorage(root), RunKey("bench", True), "token", self.events.append, self.warnings)
        self.saver = BackgroundSaver(SingleProcess(), session, SaveOptions(), BackgroundOptions(**options))

    @property
    def writer(self) -> FakeWriter:
        return FakeWriter.made[-1]

    @property
    def plan(self) -> PlanState:
        return self.saver._planner.state

    @property
    def flight(self) -> Flight:
        flight = self.saver._flights._flight
        assert flight is not None
        return flight

    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def save(self, step: Any = 1, size: int = 3, origin: Lineage | None = None) -> SaveHandle:
        request = SaveRequest.of(step, {"w": torch.ones(size)}, None)
        return self.saver.save(SingleProcess(), request, origin or Lineage(None))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    monkeypatch.setattr(flight_module, "WriterClient", FakeWriter)
    FakeWriter.made = []
    benches: list[Bench] = []

    def make_bench(**options: Any) -> Bench:
        benches.append(Bench(tmp_path, **options))
        return benches[-1]

    yield make_bench
    for bench in benches:
        bench.saver.close(0.0)
    for writer in FakeWriter.made:
        writer.delete_arenas()
        bench.saver._arena.release()
        path = bench.saver._arena.path
        assert path is None, "no arena stays"


def test_a_first_save_plans_captures_and_waits_for_the_commit(make: Callable[..., Bench]) -> None:
    bench = make()
    assert bench.plan is PlanState.UNPLANNED and bench.saver.is_idle
    handle = bench.save(7)
    assert bench.writer.messages == ["arena", "plan", "order", "captured"]
    assert bench.plan is PlanState.READY and bench.flight.state is FlightState.WRITING
    assert not handle.done() and not bench.saver.is_idle
    assert bench.names() == ["planned", "captured"]
    bench.writer.conclude()
    assert bench.flight.state is FlightState.COMMITTED and handle.done() and handle.error is None
    assert bench.saver.last_published == 7 and bench.names()[-1] == "published"


def test_the_writer_learns_how_long_the_whole_call_took(make: Callable[..., Bench]) -> None:
    bench = make()
    request = SaveRequest.of(1, {"w": torch.ones(3)}, None)
    waited = replace(request, called_s=request.called_s - 10)  # for the save before, say
    bench.saver.save(SingleProcess(), waited, Lineage(None))
    assert 10_000 <= bench.writer.stalls[0] < 100_000


def test_the_same_layout_needs_no_other_plan(make: Callable[..., Bench]) -> None:
    bench = make()
    for step in (1, 2):
        bench.save(step)
        bench.writer.conclude()
    assert bench.writer.messages == ["arena", "plan", "order", "captured", "order", "captured"]
    first, second = bench.writer.orders
    assert first.plan == second.plan and first.attempt != second.attempt
    assert (first.lineage.parent, second.lineage.parent) == (None, 1)
    bench.save(2)
    assert bench.writer.orders[-1].attempt != second.attempt, "a step that is saved again is another attempt"


@pytest.mark.parametrize(
    ("is_local", "cores", "asked", "threads"),
    [(True, 16, None, 2), (True, 1, None, 1), (False, 16, None, 8), (False, 4, None, 4), (True, 16, 5, 5)],
)
def test_a_writer_has_few_threads_on_a_disk_and_more_on_a_network(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, is_local: bool, cores: int, asked: int, threads: int
) -> None:
    monkeypatch.setattr(LocalStorage, "is_local", lambda self: is_local)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    bench = make(writer_threads=asked)
    bench.save(1)
    bench.writer.conclude()
    assert bench.writer.threads == [threads]


def test_another_layout_is_planned_again(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.save(1)
    bench.writer.conclude()
    bench.save(2, size=4)
    assert bench.names().count("planned") == 2
    assert bench.writer.orders[0].plan != bench.writer.orders[1].plan


def test_a_failed_save_warns_and_the_next_one_plans_again(make: Callable[..., Bench]) -> None:
    bench = make()
    handle = bench.save(1)
    bench.writer.conclude(StorageError("the disk is full"))
    assert bench.flight.state is FlightState.FAILED
    assert isinstance(handle.error, StorageError) and "disk is full" in str(handle.error)
    assert bench.warnings.mentions("step 1 was not saved: the disk is full")
    assert bench.saver.last_published is None
    bench.save(2)
    assert bench.names().count("planned") == 2 and len(FakeWriter.made) == 1
    bench.writer.conclude()
    assert bench.saver.last_published == 2


def test_a_failure_that_stays_in_memory_says_where(make: Callable[..., Bench]) -> None:
    bench = make()
    handle = bench.save(1)
    bench.writer.conclude(StorageError("the disk is full"), kept=True)
    assert str(bench.saver._arena.path) in str(handle.error) and "holdfast gc" in str(handle.error)


def test_a_dead_writer_is_replaced_and_gets_the_plan(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.save(1)
    bench.writer.conclude()
    bench.writer.dead = True
    bench.save(2)
    assert len(FakeWriter.made) == 2
    assert bench.writer.messages == ["arena", "plan", "order", "captured"]
    assert bench.names().count("planned") == 1, "the plan itself is still valid"


def test_a_writer_that_dies_in_flight_fails_the_save(make: Callable[..., Bench]) -> None:
    bench = make()
    handle = bench.save(1)
    bench.writer.die()
    assert isinstance(handle.error, PeerFailed) and "exit code 9" in str(handle.error)
    assert bench.flight.state is FlightState.FAILED


def test_messages_of_a_replaced_writer_are_ignored(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.save(1)
    bench.writer.conclude()
    old = bench.writer
    old.dead = True
    handle = bench.save(2)
    old.orders = bench.writer.orders
    old.conclude(StorageError("too late"))
    old.die()
    assert not handle.done()


def test_an_outcome_of_another_attempt_is_ignored(make: Callable[..., Bench]) -> None:
    bench = make()
    handle = bench.save(1)
    known = bench.writer.orders[-1]
    bench.writer.conclude()
    assert handle.done()
    second = bench.save(2)
    bench.writer.orders.append(known)
    bench.writer.conclude(StorageError("of the first"))
    assert not second.done()


def test_a_busy_saver_skips(make: Callable[..., Bench]) -> None:
    bench = make(on_busy="skip")
    first = bench.save(1)
    bench.saver.wait_for_turn()  # returns at once
    second = bench.save(2)
    assert second.skipped and isinstance(second.error, holdfast.Skipped)
    assert not first.done() and bench.flight.handle is first and bench.names()[-1] == "skipped"
    bench.writer.conclude()
    assert first.error is None and not bench.save(3).skipped


def test_the_write_of_a_restored_state_counts_as_in_flight(make: Callable[..., Bench]) -> None:
    bench = make(on_busy="skip")
    written = SaveHandle(7, 60.0)
    bench.saver.follow(written)
    assert not bench.saver.is_idle and not bench.saver.wait(0.01)
    assert bench.save(8, origin=Lineage(7, parent=5)).skipped
    written.succeed(lambda: None)  # type: ignore[arg-type,return-value]
    assert bench.saver.wait(0.01) and bench.saver.last_published == 7
    bench.save(9, origin=Lineage(7, parent=5))
    assert bench.writer.orders[-1].lineage.parent == 7


def test_a_restored_state_that_was_not_written_is_no_parent(make: Callable[..., Bench]) -> None:
    bench = make()
    written = SaveHandle(7, 60.0)
    bench.saver.follow(written)
    written.fail(PeerFailed("full"))
    bench.save(9, origin=Lineage(7, parent=5))
    assert bench.writer.orders[-1].lineage.parent == 5


class OnThreads(nn.Module):
    """A model that remembers the threads on which its state is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.threads: set[threading.Thread] = set()

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        self.threads.add(threading.current_thread())
        return super().state_dict(*arguments, **options)


@pytest.mark.parametrize("when", ["before the first step", "after it", "restored"])
def test_objects_of_the_state_are_called_on_the_callers_thread_only(tmp_path: Path, when: str) -> None:
    model = OnThreads()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    def step() -> None:
        model.layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    if when != "before the first step":
        step()
    if when == "restored":
        holdfast.save(tmp_path / step_folder(1), state, step=1)
    events: list[str] = []
    with holdfast.Checkpointer(tmp_path, on_event=lambda event: events.append(event.name)) as checkpointer:
        checkpointer.restore(state) if when == "restored" else checkpointer.prepare(state)
        for _ in range(2):  # without a step before it, a run plans ahead of the second one
            step()
        assert "planned" in events  # before any save
        checkpointer.save(2, state).result(60)
    assert model.threads == {threading.current_thread()}


def test_a_first_save_after_prepare_finds_the_state_in_the_cache(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    bench = make()
    bench.saver.prepare(SingleProcess(), state)
    bench.saver._planner.join(30)
    monkeypatch.setattr("holdfast.adapters.saving.collect.collect", None)  # may not be called
    assert bench.saver.save(SingleProcess(), SaveRequest.of(1, state, None), Lineage(None)).error is None
    assert bench.flight.state is FlightState.WRITING


def test_a_save_past_its_deadline_is_given_up_with_its_writer(make: Callable[..., Bench]) -> None:
    bench = make(deadline_s=0.05)
    handle = bench.save(1)
    writer = bench.writer
    time.sleep(0.06)
    bench.saver.wait_for_turn()
    assert isinstance(handle.error, PeerFailed) and "not written within" in str(handle.error)
    assert writer.dead and bench.saver._arena.path is None
    bench.save(2)
    assert bench.writer is not writer and bench.names().count("planned") == 2


@pytest.mark.parametrize("step", [-1, "3", True, 2**70])
def test_a_wrong_call_raises_and_leaves_nothing(make: Callable[..., Bench], step: Any) -> None:
    bench = make()
    with pytest.raises(InvalidCall) as caught:
        bench.save(step)
    assert isinstance(caught.value.error, holdfast.InvalidArgument)
    assert bench.saver.is_idle and bench.writer.orders == []


def test_a_failed_capture_is_abandoned(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()

    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(bench.saver._capturer.copier, "start", fail)
        handle = bench.save(1)
    assert isinstance(handle.error, PeerFailed) and "out of luck" in str(handle.error)
    assert bench.writer.messages[-1] == "abandon" and bench.flight.state is FlightState.FAILED
    bench.saver._hand_over(bench.flight, time.perf_counter())
    assert bench.writer.messages[-1] == "abandon", "a failed save is not handed over"


def test_no_memory_for_the_arena_is_reported_as_such(make: Callable[..., Bench]) -> None:
    bench = make(arena_bytes=10)
    with pytest.raises(NoArena, match="arena_bytes"):
        bench.save(1)
    assert bench.plan is PlanState.PLANNED and bench.saver.is_idle


def test_a_closed_saver_has_no_plan(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.save(1)
    bench.writer.conclude()
    path = Path(str(bench.saver._arena.path))
    assert path.exists() and bench.saver.close(1.0)
    assert bench.plan is PlanState.CLOSED and bench.saver._planner.ready is None and not path.exists()


def test_an_unfinished_save_reports_after_close(make: Callable[..., Bench]) -> None:
    bench = make()
    handle = bench.save(1)
    assert not bench.saver.close(0.0)
    bench.writer.conclude()
    assert handle.done() and handle.error is None


class RankOf2:
    """One rank of two, with its own writer."""

    def __init__(self, root: Path, ranks: ThreadRanks) -> None:
        self.ranks = ranks
        self.events: list[Event] = []
        session = RunSession(LocalStorage(root), RunKey("bench", True), "token", self.events.append, PendingWarnings())
        self.saver = BackgroundSaver(ranks, session, SaveOptions(), BackgroundOptions())

    def save(self, step: int, **state: Any) -> str:
        """Save and commit; return the name of the attempt."""
        request = SaveRequest.of(step, {"w": torch.ones(3), **state}, None)
        self.saver.save(self.ranks, request, Lineage(None))
        writer: Any = self.saver.writer
        writer.conclude()
        return str(writer.orders[-1].attempt)

    @property
    def plans(self) -> int:
        return sum(event.name == "planned" for event in self.events)

    def close(self) -> None:
        self.saver.close(0.0)


def test_ranks_decide_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "WriterClient", FakeWriter)

    def run(ranks: ThreadRanks) -> list[Any]:
        one = RankOf2(tmp_path, ranks)
        attempts, plans = [], []
        try:
            for step, note in enumerate([0, 0, ranks.rank, ranks.rank]):
                attempts.append(one.save(step, note=note))
                plans.append(one.plans)
            return [attempts, plans]
        finally:
            one.close()

    (first, plans), (second, others) = on_ranks(2, run)
    assert first == second and len(set(first)) == 4, "every rank writes the same attempt"
    assert plans == others == [1, 1, 2, 2], "a value that differs on one rank is planned anew on both"


def test_a_wrong_call_on_one_rank_fails_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "WriterClient", FakeWriter)

    def run(ranks: ThreadRanks) -> list[str]:
        one = RankOf2(tmp_path, ranks)
        errors = []
        try:
            for step in (-ranks.rank, ranks.rank):
                with pytest.raises((InvalidCall, holdfast.LayoutError)) as caught:
                    one.save(step)
                errors.append(str(caught.value))
            return errors
        finally:
            one.close()

    first, second = on_ranks(2, run)
    assert first == second
    assert "rank 1" in first[0] and "step=-1" in first[0]
    assert "different steps, from 0 to 1" in first[1]
