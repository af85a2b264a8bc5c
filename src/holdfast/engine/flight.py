"""The save in flight and its writer process on a rank: start, order, hand over, abandon, expire, conclude.

One rank has one writer process and at most one save in flight. The outcome arrives on the
thread that listens to the writer. Everything else here is called by BackgroundSaver.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.run_identity import RunKey
from holdfast.core.errors import HoldfastError, PeerFailed
from holdfast.core.events import Event, Listener
from holdfast.core.ranks import Ranks
from holdfast.core.warnings import PendingWarnings
from holdfast.engine.save_handle import SaveHandle
from holdfast.engine.state_machine import StateMachine
from holdfast.storage.base import SharedStorage
from holdfast.writer.arena_card import card_path
from holdfast.writer.client import DeadWriterProxy, WriterClient
from holdfast.writer.messages import AssignJob, Failure, Report, SaveEnded, SaveOrder, WriterEvent, WriterGone

if TYPE_CHECKING:
    from holdfast.capture.arena import RankArena


@dataclass(frozen=True, slots=True)
class RunSession:
    """One start of a run under a root: the run's key, a random token of this start, where news go."""

    storage: SharedStorage
    run: RunKey
    token: str
    listener: Listener
    warnings: PendingWarnings


class FlightState(Enum):
    """The states of one save in flight on one rank."""

    CAPTURING = "capturing"  # the writer has the order; copies into the arena are under way
    WRITING = "writing"  # the arena is sealed; the writer has everything it needs
    COMMITTED = "committed"
    FAILED = "failed"


FLIGHT_TRANSITIONS: Mapping[FlightState, frozenset[FlightState]] = {
    FlightState.CAPTURING: frozenset({FlightState.WRITING, FlightState.FAILED}),
    FlightState.WRITING: frozenset({FlightState.COMMITTED, FlightState.FAILED}),
    FlightState.COMMITTED: frozenset(),
    FlightState.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Cargo:
    """The values of a rank as JSON, and sizes for events: its writer gets these besides the arena."""

    values: bytes
    captured_bytes: int  # of this rank
    total_bytes: int  # of all files, on rank 0


class Flight:
    """One save in flight; its handle is done once the state is final."""

    def __init__(self, order: SaveOrder, handle: SaveHandle, cargo: Cargo, started: float, called_s: float) -> None:
        self.order = order
        self.handle = handle
        self.cargo = cargo
        self.started = started
        self._called_s = called_s
        self._machine = StateMachine(FlightState.CAPTURING, FLIGHT_TRANSITIONS)

    @property
    def state(self) -> FlightState:
        return self._machine.state

    @property
    def step(self) -> int:
        return self.order.step

    def stall_ms(self) -> float:
        """Return how long the call took, up to now if it has not returned."""
        return self.handle.stall_ms or (time.perf_counter() - self._called_s) * 1000

    def move(self, to: FlightState) -> bool:
        """Move to a state; return False if the save was committed or had failed before."""
        return self._machine.move(to)


class FlightControl:
    """One rank's writer process and the save in flight: launch, hand over, abandon, conclude."""

    def __init__(self, ranks: Ranks, session: RunSession, arena: RankArena) -> None:
        self._storage = session.storage
        self._listener = session.listener
        self._warnings = session.warnings
        self._rank = ranks.rank
        self._arena = arena
        self._dead_writer = DeadWriterProxy(session.storage, ranks.rank, ranks.world)
        self._flight: Flight | None = None
        self.writer: WriterClient | None = None
        self.last_published: int | None = None

    @property
    def is_idle(self) -> bool:
        """True if no save is in flight. Takes no lock, for signal handlers."""
        return self._flight is None or self._flight.handle.done()

    def clear_failure(self) -> bool:
        """Return True once after a save that failed: the next save plans again, on every rank."""
        if self._flight is None or self._flight.state is not FlightState.FAILED or not self.is_idle:
            return False
        self._flight = None
        return True

    def ensure_writer(self) -> bool:
        """Start a writer process unless one is alive; return True if it is new and knows no plan."""
        if self.writer is not None and self.writer.alive():
            return False
        self.writer = WriterClient(self._receive)
        self.name_arena(self._arena.path)
        return True

    def name_arena(self, path: str | None) -> None:
        """Name the arena to the writer, which deletes it if this process dies before the first save."""
        if self.writer is not None and path is not None:
            with contextlib.suppress(HoldfastError):  # the next save replaces a dead writer
                self.writer.add_arena(path)

    def assign(self, assignment: AssignJob) -> None:
        """Give a job to the writer, a new one if the writer is dead; raises PeerFailed if it dies."""
        self.ensure_writer()
        assert self.writer is not None
        self.writer.assign(assignment)

    def launch(self, flight: Flight) -> None:
        """Make a save the one in flight, and give the order to the writer; raises PeerFailed if it is dead."""
        self._flight = flight
        self._dead_writer.sweep()
        self._arena.invalidate()
        assert self.writer is not None
        self.writer.order(flight.order)

    def hand_over(self, flight: Flight, began: float) -> None:
        """Seal the arena and tell the writer that the state is captured. May run on the capture thread."""
        if self.writer is None or flight is not self._flight or not flight.move(FlightState.WRITING):
            return  # the save was abandoned in the meantime
        self._arena.seal(flight.order.attempt)
        seconds = time.perf_counter() - began
        self._emit("captured", flight.step, bytes=flight.cargo.captured_bytes, seconds=seconds)
        try:
            self.writer.captured(flight.order.attempt, flight.cargo.values, flight.stall_ms())
        except HoldfastError as error:
            self.abandon(flight, error)

    def abandon(self, flight: Flight, error: Exception) -> None:
        """Give up a save of this rank; the writer, or this process in its place, tells the other ranks."""
        if flight is not self._flight:
            return  # the save was given up before
        failure = error if isinstance(error, HoldfastError) else PeerFailed(f"{type(error).__name__}: {error}")
        if not self._tell_writer(flight, failure):
            self._dead_writer.report(flight.order, failure)
        self._fail(flight, failure)

    def _tell_writer(self, flight: Flight, failure: HoldfastError) -> bool:
        """Tell the writer of a failure; return False if there is none to tell."""
        if self.writer is None:
            return False
        try:
            self.writer.abandon(flight.order.attempt, failure)
        except HoldfastError:
            return False
        return True

    def expire(self, deadline_s: float) -> None:
        """Give up a save that missed its deadline, and its writer: the state of both is unknown."""
        flight = self._flight
        assert flight is not None
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.kill()
        self._arena.release()
        self._fail(flight, PeerFailed(f"step {flight.step} was not written within {deadline_s:.0f} s"))

    def _receive(self, writer: WriterClient, report: Report) -> None:
        """Handle a report of the writer, on the thread that listens to it. A replaced writer is ignored."""
        flight = self._flight
        if writer is not self.writer:
            return
        if isinstance(report, WriterEvent):
            self._listener(report.event)
        elif isinstance(report, SaveEnded) and flight is not None and report.attempt == flight.order.attempt:
            self._conclude(flight, report)
        elif isinstance(report, WriterGone) and flight is not None and not flight.handle.done():
            self.abandon(flight, PeerFailed(f"the writer process died: {report.why}"))

    def _conclude(self, flight: Flight, ended: SaveEnded) -> None:
        """Commit the handle, or fail it with the writer's error. Retention is reported after the publication."""
        failure = ended.outcome.failure
        committed = failure is None and flight.move(FlightState.COMMITTED)
        if failure is not None:
            message = failure.message
            if ended.kept and self._arena.path is not None:
                message = f"{message}; {self._how_to_free(self._arena.path, self._arena.size)}"
            self._fail(flight, Failure(failure.kind, message).error())
        elif committed:
            self._report_published(flight)
        for event in ended.events:
            self._listener(event)
        if committed:
            storage, folder = self._storage, flight.order.folder
            flight.handle.succeed(lambda: Checkpoint(storage, folder))

    def _report_published(self, flight: Flight) -> None:
        self.last_published = flight.step
        handle = flight.handle
        handle.seconds = seconds = time.perf_counter() - flight.started
        if self._rank == 0:
            stall = f"training waited {handle.stall_ms:.0f} ms"
            self._emit("published", flight.step, bytes=flight.cargo.total_bytes, seconds=seconds, detail=stall)

    def _fail(self, flight: Flight, failure: HoldfastError) -> None:
        if not flight.move(FlightState.FAILED):
            return
        self._warnings.add(f"step {flight.step} was not saved: {failure}")
        self._emit("failed", flight.step, detail=str(failure))
        flight.handle.fail(failure)

    def _emit(self, name: str, step: int, **fields: Any) -> None:
        self._listener(Event(name, step, self._rank, **fields))

    def _how_to_free(self, path: str, size: int) -> str:
        """Return where a captured state is that could not be written, and how to free its memory."""
        return (
            f"the captured state stays in the memory of this host: {path}, {size} bytes. The next start under "
            f"{self._storage.name} restores and writes it; to discard it and free the memory: "
            f"`holdfast gc {self._storage.name} --memory`, or `rm {path} {card_path(path)}`"
        )

    @property
    def in_flight(self) -> Flight | None:
        """The save in flight, None if none exists."""
        return None if self.is_idle else self._flight

    def wait(self, timeout_s: float) -> bool:
        """Wait for the save in flight; return False if it is not over in time."""
        return self._flight is None or self._flight.handle.wait(timeout_s)

    def close_writer(self, timeout_s: float) -> bool:
        """Ask the writer to leave; return False if it is still at work after `timeout_s`."""
        return self.writer is None or self.writer.close(timeout_s)

    def close(self, timeout_s: float, sweep_s: float, *, finished: bool) -> None:
        """Free the arena, leave it to a writer at work, or keep it for the next start if it was not written."""
        self._dead_writer.sweep(sweep_s)
        kept = self._arena.close(timeout_s, leave=not finished)
        if kept is not None and finished and not self._warnings.mentions(kept[0]):
            self._warnings.add(self._how_to_free(*kept))
        if finished:
            self._flight = None  # an unfinished save still reports its outcome to its handle
