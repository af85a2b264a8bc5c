"""Saving behind training's back: look, agree, capture, hand over to the writer process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.run_identity import RunKey
from holdfast.core.errors import (
    HoldfastError,
    LayoutError,
    NoArena,
    PeerFailed,
    Skipped,
)
from holdfast.core.events import Event, Listener
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.rank_plan import Draft, coming_arena_bytes, make_draft
from holdfast.engine.save_handle import Refusal, SaveHandle
from holdfast.engine.survey import SaveOptions, Survey
from holdfast.format.digest import digest_hex
from holdfast.format.names import step_folder
from holdfast.plan.state_values import value_text
from holdfast.storage.base import SharedStorage
from holdfast.writer.arena_card import card_path
from holdfast.writer.arena_owner import arena_prefix
from holdfast.writer.client import WriterClient
from holdfast.writer.dead_writer import DeadWriterProxy
from holdfast.writer.messages import AssignJob, Failure, Outcome, Report, SaveEnded, SaveOrder, WriterEvent, WriterGone

if TYPE_CHECKING:
    import torch

    from holdfast.adapters.saving.collected import Collected
    from holdfast.capture.copy_targets import CopyTargets
    from holdfast.plan.state_values import RankValue


@dataclass(frozen=True, slots=True)
class BackgroundOptions:
    """How a run saves in the background. Seconds are deadlines: no wait is without one."""

    deadline_s: float
    silence_s: float = 60.0
    on_busy: str = "wait"
    arena_bytes: int | None = None
    threads: int | None = None
    keep: Sequence[Any] | None = None  # the policy of retention, as its fields


@dataclass(frozen=True, slots=True)
class _Standing:
    """A plan that stands until the layout changes: the arena is there, the writer has its job."""

    draft: Draft
    spots: CopyTargets


@dataclass(frozen=True, slots=True)
class _Looked:
    """This rank's state at the call: tensors by reference, the rest by value."""

    collected: Collected
    told: Mapping[str, RankValue]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A save in flight."""

    order: SaveOrder
    handle: SaveHandle
    started: float
    values: bytes  # as JSON
    bytes: int  # of this rank
    total_bytes: int


_SWEEP_S = 5.0
_CAPTURE_S = 10.0
_GO, _STAND, _PLAN, _SKIP = "go", "stand", "plan", "skip"


class BackgroundSaver:
    """Saves the steps of one run in the background, one at a time. Every rank has one.

    After the first save the ranks exchange a few numbers, to decide as one, and no more
    until a tensor comes, goes or changes its shape or shard.
    """

    def __init__(
        self, storage: SharedStorage, options: SaveOptions, background: BackgroundOptions, listener: Listener
    ) -> None:
        from holdfast.adapters.saving.collect_cache import CollectCache
        from holdfast.adapters.tensors import Holders
        from holdfast.capture.capturer import Capturer

        self._storage = storage
        self._options = options = replace(options, whole_files=storage.whole_files)
        self._background = background
        self._listener = listener
        self._capturer = Capturer()
        self._arena: Any = None
        self._writer: WriterClient | None = None
        self._draft: Draft | None = None
        self._standing: _Standing | None = None
        self._ahead: threading.Thread | None = None
        self._holders = Holders()
        self._collect_cache = CollectCache()
        self._survey = Survey(options, self._holders)
        self._flight: _Flight | None = None
        self._life = ""
        self._root = ""
        self._number = 0
        self._rank = 0
        self._stand_in = DeadWriterProxy(storage, 0, 1)
        self._notices: dict[str, bool | None] = {}
        self._owner = os.getpid()
        self.warnings_due: list[str] = []
        self.last_published: int | None = None

    # The run: what must be known before the first save.

    def begin_run(self, ranks: Ranks, run: RunKey, life: str) -> None:
        """Take the ids of the run and of this life of it, and start the writer before it is needed."""
        from holdfast.capture.arena import RankArena

        self._rank = ranks.rank
        self._stand_in = DeadWriterProxy(self._storage, ranks.rank, ranks.world)
        self._life = life
        self._root = run.card_key
        prefix = arena_prefix(run.key, ranks.rank)
        self._arena = RankArena(prefix, self._background.arena_bytes, self._background.deadline_s, self._tell_writer)
        self._need_writer()

    def prepare(self, ranks: Ranks, state: MutableMapping[str, Any]) -> None:
        """Do ahead of the first save what it would wait for. Collective.

        The optimizers are hooked and the arena is made on a thread, as large as saves will want
        it. Ranks whose optimizers have stepped plan here and now; others plan in the first save,
        where they meet, and a single process as soon as its optimizers have stepped.
        """
        from holdfast.adapters.saving.optimizer_forecast import missing_state_tensors

        planning = self._ahead is not None and self._ahead.is_alive()
        if ranks.all_max([int(self._standing is not None or planning or not self.is_idle)])[0]:
            return  # it is ready, or about to be
        collected, _, agreement = self._survey.layout(ranks, state, self._storage.name)
        optimizers = collected.live_optimizers
        self._capturer.hooks.attach(optimizers)
        devices = {item.holder.local.device for item in collected.items}
        self._capturer.warm_up(devices)
        self._arena.prepare(
            coming_arena_bytes(ranks, collected, agreement, self._options), lambda: self._arena_made(devices)
        )
        coming = any(missing_state_tensors(optimizer) for optimizer in optimizers)
        if ranks.all_max([int(coming)])[0]:
            if ranks.world == 1:
                self._plan_when_stepped(ranks, state, optimizers)
        elif ranks.world == 1:
            self._plan_on_thread(ranks, state)
        else:
            self._draft, _ = self._make_draft(ranks, state)

    def _arena_made(self, devices: Iterable[torch.device]) -> None:
        """On the arena's thread, before anybody uses it."""
        self._capturer.probe(devices, self._arena.memory)
        self._tell("arena", bytes=self._arena.size, seconds=self._arena.seconds)

    def _plan_when_stepped(self, ranks: Ranks, state: MutableMapping[str, Any], optimizers: list[Any]) -> None:
        from holdfast.adapters.saving.optimizer_forecast import missing_state_tensors

        def look() -> bool:
            if self._draft is not None or self._ahead is not None:
                return True  # somebody else has planned by now
            if any(missing_state_tensors(optimizer) for optimizer in optimizers):
                return False
            self._plan_on_thread(ranks, state)
            return True

        self._capturer.hooks.each_step(look)

    def _plan_on_thread(self, ranks: Ranks, state: MutableMapping[str, Any]) -> None:
        from holdfast.capture.cuda_threads import current_device, enter_thread

        device = current_device()

        def plan() -> None:
            try:
                enter_thread(device)
                self._draft, _ = self._make_draft(ranks, state)
                self._stand(ranks)
            except HoldfastError as error:  # the save will say it where it is heard
                self._tell("planned", detail=f"not ahead of the first save: {error}")

        self._ahead = threading.Thread(target=plan, name="holdfast-plan", daemon=True)
        self._ahead.start()

    def _need_writer(self) -> WriterClient:
        if self._writer is None or not self._writer.alive():
            self._standing = None  # a new writer knows no plan
            self._writer = WriterClient(self._hear)
            self._tell_writer(self._arena.path)
        return self._writer

    def _tell_writer(self, arena: str | None) -> None:
        """Name the arena to the writer, which takes it away should this process die before the first save."""
        if self._writer is not None and arena is not None:
            with contextlib.suppress(HoldfastError):  # a dead writer is found, and another made, by the save
                self._writer.add_arena(arena)

    # The save.

    def save(
        self, ranks: Ranks, check: Callable[[], int], state: MutableMapping[str, Any], origin: Callable[[], Lineage]
    ) -> SaveHandle:
        """Start to save; returns once everything is captured, or will be before the next optimizer step.

        `check` gives the step, or raises if the call is wrong; `origin` tells, once it
        is not, what the step comes from; its parent is used until a step of this run is published. Raises the same
        HoldfastError on every rank if the save cannot be, Refusal if the call was wrong, NoArena
        if there is no memory for it.
        """
        started = time.perf_counter()
        busy = not self.is_idle
        step = 0
        looked: _Looked | None = None
        failure: Exception | None = None
        refused = True
        try:
            step = check()
            refused = False
            self._need_writer()
            looked = self._look(state)
        except Exception as error:  # noqa: BLE001  (the others must hear of it, whatever it is)
            failure = error
        decision = self._decide(ranks, step, busy, looked, failure, refused=refused)
        handle = SaveHandle(step, self._background.deadline_s)
        if decision == _SKIP:
            handle.skipped = True
            handle.fail(Skipped(f"step {step} was skipped: the save before it is still being written"))
            self._tell("skipped", step)
            return handle
        if decision == _PLAN or looked is None:
            looked = self._plan_anew(ranks, state)
        elif decision == _STAND:
            self._stand(ranks)
        lineage = replace(origin(), step=step)
        if self.last_published is not None:
            lineage = replace(lineage, parent=self.last_published)
        self._capture(ranks, handle, looked, lineage, started)
        self._notice()
        self._survey.warn(ranks)
        handle.stall_ms = (time.perf_counter() - started) * 1000
        return handle

    def settle(self) -> None:
        """Wait for the save before, unless the next one is to be skipped while it is in flight."""
        flight = self._flight
        if flight is None or flight.handle.done():
            return
        started = time.perf_counter()
        left = self._background.deadline_s - (started - flight.started)
        if self._background.on_busy == "skip" and left > 0:
            return
        if not flight.handle.wait(max(0.0, left)):
            self._forget()
            late = PeerFailed(f"step {flight.order.step} was not written within {self._background.deadline_s:.0f} s")
            self._failed(flight, late)
        self._tell("waited", flight.order.step, seconds=time.perf_counter() - started)

    def _forget(self) -> None:
        """Drop the writer and the plan: what they were about is not known any more."""
        self._draft = self._standing = None
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.kill()
        self._arena.release()

    def _look(self, state: MutableMapping[str, Any]) -> _Looked | None:
        """This rank's state now, if it is still as the plan has it; None if a plan must be made."""
        from holdfast.adapters.live_state import classify_state
        from holdfast.adapters.saving.collect import collect

        if self._ahead is not None:
            self._ahead.join(self._background.deadline_s)
        if self._draft is None:
            return None
        agreement = self._draft.agreement
        model_dtype = self._options.model_dtype
        collected = self._collect_cache.lookup(state, self._holders, model_dtype)
        if collected is None:
            live = replace(classify_state(state, self._options.ties), owners=self._draft.owners)
            collected = collect(live, model_dtype, self._holders)
            self._capturer.hooks.attach(collected.live_optimizers)
            self._collect_cache.store(state, live, collected)
        collected = self._survey.stored(collected)
        collected.add_tree_tensors(agreement.labels)
        if collected.signature() != self._draft.signature:
            return None
        return _Looked(collected, collected.value_reports(agreement.partitioned, on_devices=False))

    def _decide(
        self, ranks: Ranks, step: int, busy: bool, looked: _Looked | None, failure: Exception | None, *, refused: bool
    ) -> str:
        """One decision for all ranks, from a few numbers of each."""
        from holdfast.adapters.saving.agreement import plain_values_digest

        common = 0
        if looked is not None and self._draft is not None:
            uniform = sorted(self._draft.agreement.uniform & looked.told.keys())
            texts = [looked.told[name].digest for name in uniform]
            if ranks.world > 1 and self._options.replicas == "error":
                texts.append(plain_values_digest(self._draft.agreement, looked.collected))
            common = int(digest_hex("".join(texts).encode())[:15], 16)
        flags = [failure is not None, refused, busy, looked is None, self._standing is None]
        highest = ranks.all_max([*map(int, flags), self._number, step, -step, common, -common])
        failed, any_refused, any_busy, changed, unready, self._number, last, first, high, low = highest

        def raise_failure() -> None:
            if failure is not None:
                raise failure

        if failed:
            try:
                run_on_all_ranks(ranks, raise_failure)
            except HoldfastError as error:
                if any_refused:
                    raise Refusal(error) from None
                raise
        if last != -first:
            raise LayoutError(f"the ranks save different steps, from {-first} to {last}")
        if any_busy:
            return _SKIP
        if changed or high != -low:
            return _PLAN
        return _STAND if unready else _GO

    def _plan_anew(self, ranks: Ranks, state: MutableMapping[str, Any]) -> _Looked:
        self._draft = self._standing = None
        self._draft, looked = self._make_draft(ranks, state)
        self._capturer.hooks.attach(looked.collected.live_optimizers)
        self._stand(ranks)
        return looked

    def _make_draft(self, ranks: Ranks, state: MutableMapping[str, Any]) -> tuple[Draft, _Looked]:
        """Survey the ranks and plan for those of this host. Collective."""
        started = time.perf_counter()
        seen = self._survey.take(ranks, state, self._storage.name)
        draft = make_draft(ranks, seen, self._options)
        self._tell("planned", bytes=draft.arena_bytes, seconds=time.perf_counter() - started)
        return draft, _Looked(seen.collected, seen.told)

    def _stand(self, ranks: Ranks) -> None:
        """Have the arena, tell the writer its job. Collective."""
        from holdfast.capture.copy_targets import CopyTargets

        draft = self._draft
        assert draft is not None
        self._standing = None
        arena: list[Any] = []

        def make_arena() -> list[str]:
            try:
                path, memory = self._arena.require(draft.arena_bytes)
            except OSError as error:
                raise NoArena(str(error)) from error
            arena.append(memory)
            return [path, draft.digest]

        answers = run_on_all_ranks(ranks, make_arena)
        if len({digest for _, digest in answers}) != 1:
            raise LayoutError("the ranks made different plans of one layout")
        threads = self._background.threads or max(1, min(8, (os.cpu_count() or 1) // len(draft.neighbours)))
        arenas = {rank: answers[rank][0] for rank in draft.neighbours}
        assignment = AssignJob(self._storage.address, draft.job, draft.commit, arenas, threads, self._root)
        run_on_all_ranks(ranks, lambda: self._need_writer().assign(assignment))
        spans = [(source.span, source.device) for source in draft.sources]
        spots = CopyTargets.lay_out(arena[0], spans, self._capturer.copier.stream)
        self._standing = _Standing(draft, spots)

    def _capture(
        self,
        ranks: Ranks,
        handle: SaveHandle,
        looked: _Looked,
        lineage: Lineage,
        started: float,
    ) -> None:
        standing, writer = self._standing, self._writer
        self._stand_in.sweep()
        assert standing is not None and writer is not None
        self._number += 1
        name = f"{self._life}/{self._number}/{handle.step}"
        order = SaveOrder(
            f".attempt-{digest_hex(name.encode())[:16]}",
            step_folder(handle.step),
            lineage,
            self._background.deadline_s,
            self._background.silence_s,
            standing.draft.digest,
            self._background.keep,
        )
        values = value_text(looked.told, standing.draft.agreement.reporters, ranks.rank)
        draft = standing.draft
        own_bytes = sum(source.span.bytes for source in draft.sources)
        total_bytes = sum(file.size for file in draft.commit.files) if draft.commit else 0
        flight = _Flight(order, handle, started, values, own_bytes, total_bytes)
        self._flight = flight
        self._arena.invalidate()
        try:
            writer.order(order)
            items = looked.collected.items
            self._capturer.capture(
                ((items[s.item], items[s.item].holder.parts[s.part], s.span) for s in standing.draft.sources),
                looked.collected.live_optimizers,
                standing.spots,
                on_done=lambda began: self._hand_over(flight, began),
                on_error=lambda error: self._lost(flight, error),
            )
        except (HoldfastError, RuntimeError, OSError, AssertionError) as error:
            self._lost(flight, error)
        except BaseException as error:  # an interrupt: nobody shall wait for what will not be captured
            self._lost(flight, PeerFailed(f"interrupted while the state was captured: {type(error).__name__}"))
            raise

    def _notice(self) -> None:
        """What a user should know once: it will be a warning."""
        for text in filter(None, (self._capturer.notice(), self._arena.problem)):
            self._notices.setdefault(text)
        for text, said in self._notices.items():
            if not said:
                self._notices[text] = True
                self.warnings_due.append(text)

    def _hand_over(self, flight: _Flight, began: float) -> None:
        if self._writer is None or flight is not self._flight or flight.handle.done():
            return  # it was given up in the meantime
        self._arena.seal(flight.order.attempt)
        self._tell("captured", flight.order.step, bytes=flight.bytes, seconds=time.perf_counter() - began)
        try:
            self._writer.captured(flight.order.attempt, flight.values)
        except HoldfastError as error:
            self._lost(flight, error)

    # The outcome.

    def _hear(self, end: WriterClient, report: Report) -> None:
        """What the writer tells, on its own thread; one that was given up is not listened to."""
        flight = self._flight
        if end is not self._writer:
            return
        if isinstance(report, WriterEvent):
            self._listener(report.event)
        elif isinstance(report, SaveEnded) and flight is not None and report.attempt == flight.order.attempt:
            self._conclude(flight, report.outcome, kept=report.kept)
        elif isinstance(report, WriterGone) and flight is not None and not flight.handle.done():
            self._lost(flight, PeerFailed(f"the writer process died: {report.why}"))

    def _conclude(self, flight: _Flight, outcome: Outcome, *, kept: bool) -> None:
        step = flight.order.step
        seconds = time.perf_counter() - flight.started
        if outcome.failure is not None:
            message = outcome.failure.message
            if kept and self._arena.path is not None:
                message = f"{message}; {self._how_to_free(self._arena.path, self._arena.size)}"
            self._failed(flight, Failure(outcome.failure.kind, message).error())
            return
        self.last_published = step
        flight.handle.seconds = seconds
        storage, folder = self._storage, flight.order.folder
        if self._rank == 0:
            self._tell(
                "published",
                step,
                bytes=flight.total_bytes,
                seconds=seconds,
                detail=f"stall {flight.handle.stall_ms:.0f} ms",
            )
        flight.handle.succeed(lambda: Checkpoint(storage, folder))

    def _lost(self, flight: _Flight, error: Exception) -> None:
        """This rank cannot save: its writer, or this process in its place, tells the others so."""
        if flight is not self._flight:
            return  # it was given up before
        failure = error if isinstance(error, HoldfastError) else PeerFailed(f"{type(error).__name__}: {error}")
        try:
            assert self._writer is not None
            self._writer.abandon(flight.order.attempt, failure)
        except (HoldfastError, AssertionError):
            self._stand_in.report(flight.order, failure)
        self._failed(flight, failure)

    def _failed(self, flight: _Flight, failure: HoldfastError) -> None:
        if flight.handle.done():
            return
        self._draft = self._standing = None  # the next save plans anew, on every rank
        self.warnings_due.append(f"step {flight.order.step} was not saved: {failure}")
        self._tell("failed", flight.order.step, detail=str(failure))
        flight.handle.fail(failure)

    def _tell(self, name: str, step: int | None = None, **fields: Any) -> None:
        self._listener(Event(name, step, self._rank, **fields))

    # The end.

    @property
    def is_idle(self) -> bool:
        return self._flight is None or self._flight.handle.done()

    def _how_to_free(self, path: str, size: int) -> str:
        """Say where a state is that was captured and could not be written, and what becomes of it."""
        return (
            f"what was captured stays in the memory of this host: {path}, {size} bytes. The next start under "
            f"{self._storage.name} restores and writes it; to give it up and free the memory: "
            f"`holdfast gc {self._storage.name} --memory`, or `rm {path} {card_path(path)}`"
        )

    def wait(self, timeout_s: float) -> bool:
        """Wait for the save in flight, if there is one; False if it is not over in time."""
        return self._flight is None or self._flight.handle.wait(timeout_s)

    def close(self, timeout_s: float, *, keep: Callable[[], bool] = lambda: True) -> bool:
        """Finish what is in flight and let the writer go; False if it is still at work after `timeout_s`.

        A state that was captured and could not be written stays in memory for the next start,
        unless `keep`, asked once the save is over, says that there is no need.
        """
        if self._owner != os.getpid():
            return True  # a forked child: none of this is its own
        end = time.monotonic() + timeout_s

        def left() -> float:
            return max(0.0, end - time.monotonic())

        finished = self.wait(timeout_s)
        if self._ahead is not None:
            self._ahead.join(max(1.0, left()))
        self._capturer.close(max(_CAPTURE_S, left()))  # the writer can finish without us once all is captured
        if self._writer is not None:
            finished = self._writer.close(max(1.0, left()) if finished else 0.0) and finished
        self._stand_in.sweep(min(timeout_s, _SWEEP_S))
        if self._arena is not None:
            kept = self._arena.close(max(1.0, left()), leave=not finished, keep=keep())
            if kept is not None and finished and not any(kept[0] in text for text in self.warnings_due):
                self.warnings_due.append(self._how_to_free(*kept))
        self._draft = self._standing = None
        if finished:
            self._flight = None  # else its handle still wants to hear of the outcome
        return finished
