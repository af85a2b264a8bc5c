"""A background save: survey, one decision of all ranks, plan, capture, hand over. See `BackgroundSaver.save`.

    survey     LocalState   this rank's state at the call: tensors by reference, other values by value
    agree      SaveDecision     one decision for all ranks: go, plan again, or skip
    plan       ReadyPlan    files, blocks, this rank's arena; the writer has its job
    capture    Flight       tensors are copied into the arena while training continues
    hand over               the arena is sealed; the writer process gathers, digests and writes the blocks
    commit                  rank 0's writer publishes the checkpoint; flight.py receives the outcome

Between two saves of one layout the ranks exchange only the few numbers of `agree`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from holdfast.checkpoint.lineage import Lineage
from holdfast.core.collector import paused_collector
from holdfast.core.errors import HoldfastError, LayoutError, PeerFailed, Skipped
from holdfast.core.events import Event
from holdfast.core.names import step_folder
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.extra_files import ExtraFileEncoder
from holdfast.engine.flight import Cargo, Flight, FlightControl, RunSession
from holdfast.engine.options import BackgroundOptions, SaveOptions
from holdfast.engine.planner import LocalState, Planner, PlanState, ReadyPlan
from holdfast.engine.program_save import ProgramEncoder
from holdfast.engine.rank_plan import RankPlan
from holdfast.engine.save_handle import InvalidCall, SaveHandle, SaveRequest
from holdfast.format.digest import digest_hex
from holdfast.plan.state_values import RankValue, value_text
from holdfast.writer.arena_card import arena_prefix
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import SaveOrder

_SWEEP_S = 5.0
_CAPTURE_S = 10.0
_QUIET_S = 2.0  # a wait for the last save is reported after this time


class SaveDecision(Enum):
    """The action that all ranks take for one call of `save`."""

    GO = "go"  # capture by the plan that is ready
    PREPARE = "prepare"  # the plan is valid; get an arena and give the writer its job
    PLAN = "plan"  # survey all ranks and plan again
    SKIP = "skip"  # the save before is still in flight


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank's answer to the call of `save`, from which all ranks decide."""

    request: SaveRequest
    local: LocalState | None  # None if the plan does not fit the state
    failure: Exception | None
    busy: bool


class BackgroundSaver:
    """Saves the steps of one run in the background, one at a time. Every rank has one."""

    def __init__(self, ranks: Ranks, session: RunSession, options: SaveOptions, background: BackgroundOptions) -> None:
        """Start the writer process; raises PeerFailed if it cannot start."""
        from holdfast.capture.arena import RankArena
        from holdfast.capture.capturer import Capturer

        self._session = session
        self._options = options
        self._background = background
        self._rank = ranks.rank
        self._owner = os.getpid()
        self._number = 0  # of the last attempt
        self._followed: SaveHandle | None = None  # the write of a restored state, on rank 0
        self._capturer = Capturer()
        self._extra_files = ExtraFileEncoder()
        self._program = None if options.program is None else ProgramEncoder(options.program)
        prefix = arena_prefix(session.run.key, ranks.rank)
        self._arena = RankArena(prefix, background.arena_limit_bytes, background.deadline_s, self._name_arena)
        self._flights = FlightControl(ranks, session, self._arena)
        self._planner = Planner(ranks, session, options, background, self._capturer, self._arena, self._flights)
        self._flights.ensure_writer()

    def _name_arena(self, path: str) -> None:
        self._flights.name_arena(path)

    @property
    def writer(self) -> WriterClient | None:
        """The trainer's end of its writer process."""
        return self._flights.writer

    def prepare(self, ranks: Ranks, state: MutableMapping[str, Any]) -> None:
        """Do work of the first save ahead of it. Collective."""
        self._drop_failed_plan()
        self._planner.prepare(ranks, state)

    @paused_collector()
    def save(self, ranks: Ranks, request: SaveRequest, origin: Lineage) -> SaveHandle:
        """Start a save; return once everything is captured, or will be before the next optimizer step.

        The parent is `origin`'s until a step of this run is published. Raises the same error on
        every rank: InvalidCall if the call was wrong, NoArena without memory for the capture, or
        another HoldfastError.
        """
        started = time.perf_counter()
        status = self._survey(request)
        decision = self._agree(ranks, status)
        handle = SaveHandle(request.step, self._background.deadline_s)
        if decision is SaveDecision.SKIP:
            return self._skip(handle)
        ready, local = self._get_plan(ranks, request, decision, status.local)
        flight = self._new_flight(ranks, ready.plan, handle, origin, request, local, started)
        self._capture(flight, ready, local)  # which ends in _hand_over, at once or on the capture thread
        for notice in filter(None, (self._capturer.notice(), self._arena.problem)):
            self._session.warnings.add_once(notice)
        self._planner.surveyor.warn(ranks)
        handle.stall_ms = (time.perf_counter() - started) * 1000
        return handle

    def _survey(self, request: SaveRequest) -> RankStatus:
        """Collect this rank's state, if the call is right. Errors are values: the ranks decide together."""
        busy = not self.is_idle
        self._drop_failed_plan()
        try:
            request.require_valid()
            if self._flights.ensure_writer():
                self._planner.writer_is_new()
            return RankStatus(request, self._planner.local_state(request.state), None, busy)
        except Exception as error:  # noqa: BLE001  (other ranks must learn of any error)
            return RankStatus(request, None, error, busy)

    def _agree(self, ranks: Ranks, status: RankStatus) -> SaveDecision:
        """Decide for all ranks, from a few numbers of each. Raises the first rank's error on every rank."""
        step, failure = status.request.step, status.failure
        common = self._digest_common_values(ranks, status.local)
        flags = [
            failure is not None,
            status.request.error is not None,
            status.busy,
            status.local is None,
            self._planner.state is not PlanState.READY,
        ]
        published = -1 if self.last_published is None else self.last_published
        highest = ranks.all_max([*map(int, flags), self._number, step, -step, common, -common, published])
        failed, invalid, busy, changed, unready, self._number, last, first, high, low, published = highest
        self._flights.last_published = None if published < 0 else published

        def raise_failure() -> None:
            if failure is not None:
                raise failure

        if failed:
            try:
                run_on_all_ranks(ranks, raise_failure)
            except HoldfastError as error:
                if invalid:
                    raise InvalidCall(error) from None
                raise
        if last != -first:
            raise LayoutError(f"the ranks save different steps, from {-first} to {last}")
        if busy:
            return SaveDecision.SKIP
        if changed or high != -low:
            return SaveDecision.PLAN
        return SaveDecision.PREPARE if unready else SaveDecision.GO

    def _digest_common_values(self, ranks: Ranks, local: LocalState | None) -> int:
        """Digest the values that were equal on all ranks when they planned; they must still be equal."""
        from holdfast.adapters.saving.agreement import plain_values_digest

        plan = self._planner.plan
        if local is None or plan is None:
            return 0
        agreement = plan.agreement
        texts = [local.values[name].digest for name in sorted(agreement.uniform & local.values.keys())]
        if ranks.world > 1 and self._options.replicas == "error":
            texts.append(plain_values_digest(agreement, local.collected))
        return int(digest_hex("".join(texts).encode())[:15], 16)

    def _skip(self, handle: SaveHandle) -> SaveHandle:
        handle.skipped = True
        handle.fail(Skipped(f"step {handle.step} was skipped: the save before it is still being written"))
        self._emit("skipped", handle.step)
        return handle

    def _get_plan(
        self, ranks: Ranks, request: SaveRequest, decision: SaveDecision, local: LocalState | None
    ) -> tuple[ReadyPlan, LocalState]:
        """Return the plan of the last save, or make one. Collective unless the decision is to go."""
        if decision is SaveDecision.PLAN or local is None:
            self._planner.drop()
            local = self._planner.plan_layout(ranks, request.state)
            self._capturer.hooks.attach(local.collected.live_optimizers.values())
            self._planner.make_ready(ranks)
        elif decision is SaveDecision.PREPARE:
            self._planner.make_ready(ranks)
        assert self._planner.ready is not None
        return self._planner.ready, local

    def _new_flight(
        self,
        ranks: Ranks,
        plan: RankPlan,
        handle: SaveHandle,
        origin: Lineage,
        request: SaveRequest,
        local: LocalState,
        started: float,
    ) -> Flight:
        """Number the attempt, the same on every rank, and write the order for the writer."""
        self._number += 1
        name = f"{self._session.token}/{self._number}/{request.step}"
        published = self._flights.last_published
        parent = origin.parent if published is None else published
        background = self._background
        order = SaveOrder(
            attempt=f".attempt-{digest_hex(name.encode())[:16]}",
            folder=step_folder(request.step),
            lineage=replace(origin, step=request.step, parent=parent, metrics=request.metrics),
            deadline_s=background.deadline_s,
            silence_s=background.silence_s,
            plan=plan.digest,
            keep=None if background.keep is None else background.keep.fields(),
        )
        own = dict(local.values)
        if request.files:
            own |= self._extra_files.values(request.files)
        own |= self._program_values(ranks, plan)
        values = value_text(own, plan.agreement.reporters, ranks.rank)
        cargo = Cargo(values, plan.captured_bytes, plan.total_bytes)
        return Flight(order, handle, cargo, started, request.called_s)

    def _program_values(self, ranks: Ranks, plan: RankPlan) -> Mapping[str, RankValue]:
        """Return the files of the program, on rank 0. A step whose program does not fit is saved without it."""
        if self._program is None or ranks.rank:
            return {}
        try:
            return self._program.values(plan.agreement, self._planner.surveyor.stored_keys)
        except HoldfastError as error:
            self._session.warnings.add_once(f"the steps of this run are saved without the program: {error}")
            return {}

    def _capture(self, flight: Flight, ready: ReadyPlan, local: LocalState) -> None:
        """Order the save, and start to copy the state into the arena. Failures fail the handle."""
        try:
            self._flights.launch(flight)
            self._capturer.capture(
                local.sources(ready.plan),
                list(local.collected.live_optimizers.values()),
                ready.targets,
                on_done=lambda began: self._hand_over(flight, began),
                on_error=lambda error: self._flights.abandon(flight, error),
            )
        except (HoldfastError, RuntimeError, OSError, AssertionError) as error:
            self._flights.abandon(flight, error)
        except BaseException as error:  # an interrupt: no rank may wait for this capture
            interrupted = PeerFailed(f"interrupted while the state was captured: {type(error).__name__}")
            self._flights.abandon(flight, interrupted)
            raise

    def _hand_over(self, flight: Flight, began: float) -> None:
        """Give the captured state to the writer, which commits it."""
        self._flights.hand_over(flight, began)

    # Between saves, and the end.

    def follow(self, handle: SaveHandle) -> None:
        """Treat the write of a captured state, which was restored, as the save in flight. On rank 0."""
        self._followed = handle

    @property
    def is_idle(self) -> bool:
        return self._flights.is_idle and (self._followed is None or self._followed.done())

    def wait(self, timeout_s: float) -> bool:
        """Wait for the save in flight; return False if it is not over in time."""
        end = time.monotonic() + timeout_s
        followed = self._followed is None or self._followed.wait(timeout_s)
        return self._flights.wait(max(0.0, end - time.monotonic())) and followed

    def wait_for_turn(self) -> None:
        """Wait for the save before, unless the next save is to be skipped while it is in flight."""
        started = time.perf_counter()
        deadline_s = self._background.deadline_s
        if self._followed is not None and self._background.on_busy != "skip" and not self._followed.done():
            self._followed.wait()
            self._emit("waited", self._followed.step, seconds=time.perf_counter() - started)
        flight = self._flights.in_flight
        if flight is None:
            return
        left = deadline_s - (started - flight.started)
        if self._background.on_busy == "skip" and left > 0:
            return
        if not flight.handle.wait(max(0.0, left)):
            self._flights.expire(deadline_s)
        self._emit("waited", flight.step, seconds=time.perf_counter() - started)

    @property
    def last_published(self) -> int | None:
        """The last step that this run has published since it restored one, or the restored one from memory."""
        followed = self._followed
        if self._flights.last_published is None and followed is not None and followed.done() and not followed.error:
            return followed.step
        return self._flights.last_published

    def forget_published(self) -> None:
        """Let the next save descend from its `origin`: another step was restored."""
        self._flights.last_published = None
        self._followed = None

    def keep_names(self, names: Mapping[str, str]) -> None:
        """Write modules under the names of the step that was restored."""
        self._planner.keep_names(names)

    def _drop_failed_plan(self) -> None:
        """Plan again after a failed save: another rank may have dropped its plan."""
        if self._flights.clear_failure():
            self._planner.drop()

    def _emit(self, name: str, step: int | None = None, **fields: Any) -> None:
        self._session.listener(Event(name, step, self._rank, **fields))

    def _wait_to_close(self, timeout_s: float) -> bool:
        """Wait for the save in flight; report the wait, on rank 0, if it takes a while."""
        if self.wait(min(timeout_s, _QUIET_S)) or timeout_s <= _QUIET_S:
            return self.is_idle
        left_s = timeout_s - _QUIET_S
        if self._rank == 0:
            waited_for = self._flights.in_flight or self._followed
            step = None if waited_for is None else waited_for.step
            self._emit("closing", step, detail=f"waiting up to {left_s:.0f} s until this step is published")
        return self.wait(left_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the save in flight and release the writer; return False if it is at work after `timeout_s`.

        A captured state that could not be written stays in memory for the next start.
        """
        if self._owner != os.getpid():
            return True  # a forked child owns nothing of this
        end = time.monotonic() + timeout_s

        def left() -> float:
            return max(0.0, end - time.monotonic())

        finished = self._wait_to_close(timeout_s)
        self._planner.join(max(1.0, left()))
        self._capturer.close(max(_CAPTURE_S, left()))  # the writer finishes by itself once all is captured
        finished = self._flights.close_writer(max(1.0, left()) if finished else 0.0) and finished
        self._flights.close(max(1.0, left()), min(timeout_s, _SWEEP_S), finished=finished)
        self._planner.close()
        return finished
