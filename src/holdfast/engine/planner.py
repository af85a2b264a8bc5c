"""The plan that background saves reuse: made ahead of the first save, given an arena, dropped, made again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from holdfast.core.collector import paused_collector
from holdfast.core.errors import LayoutError, NoArena
from holdfast.core.events import Event
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.flight import FlightControl, RunSession
from holdfast.engine.options import BackgroundOptions, SaveOptions
from holdfast.engine.rank_plan import RankPlan, forecast_arena_bytes, plan_rank
from holdfast.engine.state_machine import StateMachine
from holdfast.engine.survey import LayoutSurvey, Surveyor
from holdfast.storage.local import LocalStorage
from holdfast.writer.messages import AssignJob

if TYPE_CHECKING:
    import torch

    from holdfast.adapters.saving.collect import Collected, SaveItem
    from holdfast.capture.arena import RankArena
    from holdfast.capture.capturer import Capturer
    from holdfast.capture.copy import CopyTargets
    from holdfast.layout.placement import ShardBox
    from holdfast.plan.state_values import RankValue
    from holdfast.plan.writer_job import ArenaSpan

_DISK_THREADS = 2  # of a rank's writer: they fill a disk, and more of them slow the training beside them
_NETWORK_THREADS = 8  # each waits for answers most of the time


class PlanState(Enum):
    """The states of the plan."""

    UNPLANNED = "unplanned"  # the next save surveys all ranks and plans
    PLANNED = "planned"  # there is a RankPlan; the arena or the writer is not ready for it
    READY = "ready"  # the arena is large enough, and the writer has its job
    CLOSED = "closed"


PLAN_TRANSITIONS: Mapping[PlanState, frozenset[PlanState]] = {
    PlanState.UNPLANNED: frozenset({PlanState.UNPLANNED, PlanState.PLANNED, PlanState.CLOSED}),
    PlanState.PLANNED: frozenset({PlanState.UNPLANNED, PlanState.PLANNED, PlanState.READY, PlanState.CLOSED}),
    PlanState.READY: frozenset({PlanState.UNPLANNED, PlanState.PLANNED, PlanState.CLOSED}),
    PlanState.CLOSED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class LocalState:
    """This rank's state at the call of `save`: tensors by reference, other values by value."""

    collected: Collected
    values: Mapping[str, RankValue]

    def sources(self, plan: RankPlan) -> Iterator[tuple[SaveItem, ShardBox, ArenaSpan]]:
        """Yield the tensors, their parts and the spans of the arena into which a plan captures them."""
        items = self.collected.items
        return ((items[s.item], items[s.item].holder.parts[s.part], s.span) for s in plan.sources)


@dataclass(frozen=True, slots=True)
class ReadyPlan:
    """A plan with an arena: where each source of the plan is copied to."""

    plan: RankPlan
    targets: CopyTargets


class Planner:
    """Keeps one rank's plan. `state` changes only in `_move`, together with the plan that belongs to it."""

    def __init__(
        self,
        ranks: Ranks,
        session: RunSession,
        options: SaveOptions,
        background: BackgroundOptions,
        capturer: Capturer,
        arena: RankArena,
        flights: FlightControl,
    ) -> None:
        from holdfast.adapters.saving.collect_cache import CollectCache
        from holdfast.adapters.tensors import Holders

        self._rank = ranks.rank
        self._session = session
        self._options = options = replace(options, whole_files=session.storage.whole_files)
        self._background = background
        self._capturer = capturer
        self._arena = arena
        self._flights = flights
        self._holders = Holders()
        self._collect_cache = CollectCache()
        self._thread: threading.Thread | None = None
        self._machine = StateMachine(PlanState.UNPLANNED, PLAN_TRANSITIONS)
        self.surveyor = Surveyor(options, self._holders)
        self.plan: RankPlan | None = None  # set in PLANNED and READY
        self.ready: ReadyPlan | None = None  # set in READY

    @property
    def state(self) -> PlanState:
        return self._machine.state

    def _move(self, to: PlanState, plan: RankPlan | None = None, ready: ReadyPlan | None = None) -> None:
        if self._machine.move(to):
            self.plan, self.ready = plan, ready

    def drop(self) -> None:
        """Forget the plan: the next save plans again, on every rank."""
        self._move(PlanState.UNPLANNED)

    def keep_names(self, names: Mapping[str, str]) -> None:
        """Write modules under these names from now on; a plan with other names is dropped."""
        self.join(self._background.deadline_s)
        if self.surveyor.keep_names(names):
            self.drop()

    def writer_is_new(self) -> None:
        """Keep the plan, and send it again: a new writer process has no job."""
        if self.state is PlanState.READY:
            self._move(PlanState.PLANNED, self.plan)

    # Ahead of the first save.

    def prepare(self, ranks: Ranks, state: MutableMapping[str, Any]) -> None:
        """Do work of the first save ahead of it. Collective.

        Optimizers are hooked, and a thread allocates the arena with its expected size. Ranks whose
        optimizers have stepped plan now. Other ranks plan in the first save, where they meet; a
        single process plans as soon as its optimizers have stepped, and gets ready on a thread.
        """
        from holdfast.adapters.saving.optimizer_forecast import missing_state_tensors

        is_planning = self._thread is not None and self._thread.is_alive()
        if ranks.all_max([int(self.state is PlanState.READY or is_planning or not self._flights.is_idle)])[0]:
            return
        layout = self.surveyor.survey_layout(ranks, state, self._session.storage.name)
        optimizers = list(layout.collected.live_optimizers.values())
        self._capturer.hooks.attach(optimizers)
        devices = {item.holder.local.device for item in layout.collected.items}
        size = forecast_arena_bytes(ranks, layout, self._options)
        self._arena.prepare(size, lambda: self._probe_arena(devices))
        has_unstepped = any(missing_state_tensors(optimizer) for optimizer in optimizers)
        if ranks.all_max([int(has_unstepped)])[0]:
            if ranks.world == 1:
                self._plan_after_step(ranks, state, optimizers)
        else:
            self.plan_layout(ranks, state, layout)
            local = self._rehearse(state)
            if ranks.world == 1:
                self._make_ready_on_thread(ranks, local)

    def _probe_arena(self, devices: Iterable[torch.device]) -> None:
        """Load what copies need and measure them, on the thread that allocated the arena."""
        self._capturer.warm_up(devices)
        self._capturer.probe(devices, self._arena.memory)
        self._emit("arena", bytes=self._arena.size, seconds=self._arena.seconds)

    def _plan_after_step(self, ranks: Ranks, state: MutableMapping[str, Any], optimizers: list[Any]) -> None:
        from holdfast.adapters.saving.optimizer_forecast import missing_state_tensors

        def plan_if_stepped() -> bool:
            if self.state is not PlanState.UNPLANNED or self._thread is not None:
                return True  # a save has planned in the meantime
            if any(missing_state_tensors(optimizer) for optimizer in optimizers):
                return False
            try:
                self.plan_layout(ranks, state)
            except Exception as error:  # noqa: BLE001  (the save raises it again)
                self._emit("planned", detail=f"not ahead of the first save: {error}")
                return True
            self._make_ready_on_thread(ranks, self._rehearse(state))
            return True

        self._capturer.hooks.each_step(plan_if_stepped)

    def _make_ready_on_thread(self, ranks: Ranks, local: LocalState | None) -> None:
        """Wait for the arena, give the writer its job and try the copies, beside the training.

        The thread reads tensors and calls no object of the state: FSDP2's state_dict() reshards modules whose
        forward runs, and others' may be no safer.
        """
        from holdfast.capture.cuda_threads import current_device, enter_thread

        device = current_device()

        def make_ready() -> None:
            try:
                enter_thread(device)
                self.make_ready(ranks)
                if local is not None and self.ready is not None and not self._arena.has_card():
                    self._capturer.rehearse(local.sources(self.ready.plan), self.ready.targets)
            except Exception as error:  # noqa: BLE001  (the save raises it again, if it matters there)
                self._emit("planned", detail=f"not ready ahead of the first save: {error}")

        self._thread = threading.Thread(target=make_ready, name="holdfast-ready", daemon=True)
        self._thread.start()

    def _rehearse(self, state: MutableMapping[str, Any]) -> LocalState | None:
        """Collect the state as a save does, so that the first one finds caches filled."""
        try:
            for _ in range(2):  # collected, then found in the cache
                local = self._collect_own(state)
        except Exception as error:  # noqa: BLE001  (the save raises it again, if it matters there)
            self._emit("planned", detail=f"without a rehearsal: {error}")
            return None
        return local

    # In a save.

    def local_state(self, state: MutableMapping[str, Any]) -> LocalState | None:
        """Return this rank's state now, None if there is no plan or the plan does not fit."""
        self.join(self._background.deadline_s)
        return self._collect_own(state)

    def _collect_own(self, state: MutableMapping[str, Any]) -> LocalState | None:
        from holdfast.adapters.live_state import classify_state
        from holdfast.adapters.saving.collect import collect

        plan = self.plan
        if plan is None:
            return None
        model_dtype = self._options.model_dtype
        bases = self.surveyor.bases
        if not bases.still_fit(state):
            return None
        collected = self._collect_cache.lookup(state, self._holders, model_dtype, self.surveyor.selection)
        if collected is None:
            live = replace(classify_state(state, self._options.ties, bases.parts), owners=dict(plan.owners))
            surveyor = self.surveyor
            collected = collect(live, model_dtype, self._holders, surveyor.selection, surveyor.by_coordinate)
            self._capturer.hooks.attach(collected.live_optimizers.values())
            self._collect_cache.store(state, live, collected)
        collected.bases = bases.records
        collected = self.surveyor.as_stored(collected)
        collected.add_tree_tensors(plan.agreement.labels)
        if collected.signature() != plan.signature:
            return None
        return LocalState(collected, collected.value_reports(plan.agreement.partitioned, on_devices=False))

    @paused_collector()
    def plan_layout(
        self, ranks: Ranks, state: MutableMapping[str, Any], layout: LayoutSurvey | None = None
    ) -> LocalState:
        """Survey all ranks, unless their layout is given, and plan for those of this host. Collective."""
        started = time.perf_counter()
        if layout is None:
            layout = self.surveyor.survey_layout(ranks, state, self._session.storage.name)
        survey = self.surveyor.compare_replicas(ranks, layout)
        plan = plan_rank(ranks, survey, self._options)
        self._move(PlanState.PLANNED, plan)
        self._emit("planned", bytes=plan.arena_bytes, seconds=time.perf_counter() - started)
        return LocalState(survey.collected, survey.values)

    def make_ready(self, ranks: Ranks) -> None:
        """Get an arena for the plan, and give the writer its job. Collective."""
        from holdfast.capture.copy import CopyTargets

        plan = self.plan
        assert plan is not None
        self._move(PlanState.PLANNED, plan)
        memory: list[torch.Tensor] = []

        def require_arena() -> list[str]:
            try:
                path, arena = self._arena.require(plan.arena_bytes)
            except OSError as error:
                raise NoArena(str(error)) from error
            memory.append(arena)
            return [path, plan.digest]

        answers = run_on_all_ranks(ranks, require_arena)
        if len({digest for _, digest in answers}) != 1:
            raise LayoutError("the ranks made different plans of one layout")
        assignment = self._assignment(plan, {rank: answers[rank][0] for rank in plan.neighbors})
        run_on_all_ranks(ranks, lambda: self._flights.assign(assignment))
        spans = [(source.span, source.device) for source in plan.sources]
        targets = CopyTargets.lay_out(memory[0], spans, self._capturer.copier.stream)
        self._move(PlanState.READY, plan, ReadyPlan(plan, targets))

    def _assignment(self, plan: RankPlan, arenas: Mapping[int, str]) -> AssignJob:
        """Return the message that gives the writer its job; `arenas` are the paths of this host's arenas, by rank."""
        session = self._session
        on_disk = isinstance(session.storage, LocalStorage) and session.storage.is_local()
        usual = _DISK_THREADS if on_disk else _NETWORK_THREADS
        threads = self._background.writer_threads or max(1, min(usual, (os.cpu_count() or 1) // len(arenas)))
        return AssignJob(session.storage.address, plan.job, plan.commit, arenas, threads, session.run.card_key)

    def _emit(self, name: str, **fields: Any) -> None:
        self._session.listener(Event(name, None, self._rank, **fields))

    def join(self, timeout_s: float) -> None:
        """Wait for the planning thread."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        self._move(PlanState.CLOSED)
