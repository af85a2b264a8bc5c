"""Leftovers of earlier starts on all hosts: clean up, find the newest captured state, write it from memory, drop."""

from __future__ import annotations

import queue
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.checkpoint import retention
from holdfast.checkpoint.catalog import Catalog, Committed, is_left, living_steps
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.retention import RetentionIndex
from holdfast.core.errors import HoldfastError, PeerFailed
from holdfast.core.names import step_folder
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.threads import cores
from holdfast.engine.options import BackgroundOptions
from holdfast.storage.base import SharedStorage
from holdfast.writer import startup_cleanup
from holdfast.writer.arena_card import Card, Process, captured_sets, trainers
from holdfast.writer.client import WriterClient
from holdfast.writer.messages import AssignJob, Report, SaveEnded, SaveOrder, WriterEvent, WriterGone
from holdfast.writer.startup_cleanup import wait_for_writers

_OF_DEADLINE = 0.8  # the writing rank gives up before the other ranks stop waiting for it
_LEAVE_S = 15.0  # longer than a writer waits for others to read an outcome
_THREADS = 8  # of all writers of the host


@dataclass(frozen=True, slots=True)
class Captured:
    """A state that was captured on every rank and never published; `cards` are those of this host."""

    attempt: str
    lineage: Lineage
    plan: str
    cards: list[Card]
    is_here: bool  # every rank's host has the cards of all ranks
    is_whole: bool  # the hosts that run now have the cards of all ranks

    @property
    def step(self) -> int:
        return self.lineage.step or 0

    @property
    def bytes(self) -> int:
        """The size of the files that the cards of this host make."""
        return sum(card.job.bytes for card in self.cards)


@dataclass(frozen=True, slots=True)
class CapturedSet:
    """The captured arenas of one attempt, as the ranks exchange them."""

    attempt: str
    lineage: Lineage
    plan: str
    world: int
    hosts: int
    ranks: tuple[int, ...]
    arenas: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """True if the arenas of all ranks exist."""
        return sorted(self.ranks) == list(range(self.world))

    @staticmethod
    def of(attempt: str, cards: Sequence[Card]) -> CapturedSet:
        job = cards[0].job
        return CapturedSet(
            attempt,
            cards[0].lineage,
            job.plan,
            job.world,
            job.hosts,
            tuple(card.rank for card in cards),
            tuple(card.arena for card in cards),
        )

    def joined(self, other: CapturedSet) -> CapturedSet:
        """Return the arenas of two hosts together."""
        return replace(self, ranks=self.ranks + other.ranks, arenas=self.arenas + other.arenas)

    def fields(self) -> list[Any]:
        """Return the JSON form."""
        lineage = self.lineage.fields()
        return [self.attempt, lineage, self.plan, self.world, self.hosts, list(self.ranks), list(self.arenas)]

    @staticmethod
    def from_fields(fields: Sequence[Any]) -> CapturedSet:
        attempt, lineage, plan, world, hosts, ranks, arenas = fields
        return CapturedSet(attempt, Lineage.from_fields(lineage), plan, world, hosts, tuple(ranks), tuple(arenas))


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The result of a cleanup on this rank, or on all ranks.

    `attempts` counts the attempts that nobody held. `strangers` are living processes that save
    under the same root and are not of this run. `older` are arenas that a version without
    identities left for this path.
    """

    attempts: int
    waited_s: float
    strangers: tuple[str, ...]
    older: tuple[str, ...]

    def fields(self) -> list[Any]:
        """Return the JSON form."""
        return [self.attempts, self.waited_s, list(self.strangers), list(self.older)]

    @staticmethod
    def from_fields(fields: Sequence[Any]) -> Cleaned:
        attempts, waited_s, strangers, older = fields
        return Cleaned(attempts, waited_s, tuple(strangers), tuple(older))


class Leftovers:
    """Finds, cleans and adopts what earlier starts of a run left. Calls are collective unless they say so."""

    def __init__(self, storage: SharedStorage, run: str, options: BackgroundOptions) -> None:
        self._storage = storage
        self._run = run
        self._options = options
        self._leads = False  # whether this rank is the first of its host
        self._index = RetentionIndex(storage)
        self._hosts = 1

    @property
    def catalog(self) -> Catalog:
        """The catalog of the root's steps since the start, on rank 0."""
        return self._index.catalog

    def clean(self, ranks: Ranks) -> Cleaned:
        """Wait for living writers, then remove what nobody holds and nobody can restore."""
        started = time.monotonic()
        dead: set[str] = set()

        def wait() -> None:
            limits = self._options.deadline_s, self._options.silence_s
            dead.update(wait_for_writers(self._storage, self._run, *limits, look_at_storage=ranks.rank == 0))

        run_on_all_ranks(ranks, wait)
        waited_s = time.monotonic() - started
        processes = self._meet(ranks)
        captured = self._captured_sets(ranks)

        def clean() -> list[Any]:
            removed = self._clean_storage(dead) if ranks.rank == 0 else []
            if not self._leads:
                return Cleaned(len(removed), waited_s, (), ()).fields()
            kept = {arena for found in captured.values() for arena in found.arenas}
            startup_cleanup.clean_arenas(self._run, kept.__contains__)
            strangers = trainers(self._run) - processes
            older = startup_cleanup.older_arenas(self._storage)
            return Cleaned(len(removed), waited_s, tuple(sorted(map(str, strangers))), tuple(older)).fields()

        answers = [Cleaned.from_fields(fields) for fields in run_on_all_ranks(ranks, clean)]
        return Cleaned(
            answers[0].attempts,
            waited_s,
            tuple(process for answer in answers for process in answer.strangers),
            tuple(path for answer in answers for path in answer.older),
        )

    def _meet(self, ranks: Ranks) -> set[Process]:
        """Learn which ranks share a host, and return the processes of all ranks."""
        own = Process.current()
        known_ranks: list[list[Any]] = run_on_all_ranks(ranks, lambda: [ranks.host(), own.pid, own.namespace])
        hosts = [host for host, _, _ in known_ranks]
        self._leads = hosts.index(hosts[ranks.rank]) == ranks.rank
        self._hosts = len(set(hosts))
        return {Process(pid, namespace) for _, pid, namespace in known_ranks}

    def _clean_storage(self, dead: Collection[str]) -> list[str]:
        """Remove dead attempts, and finish removals and renames that were interrupted."""
        gone = startup_cleanup.clean_storage(self._storage, dead)
        retention.apply(self._storage, None, index=self._index)
        startup_cleanup.sweep_removed(self._storage)
        return gone

    def newest(self, ranks: Ranks) -> Captured | None:
        """Return the newest captured state that is newer than every checkpoint, None if none exists.

        It may be incomplete: then hosts where no rank runs now have the rest.
        """
        captured = self._captured_sets(ranks)
        if not captured:
            return None  # on every rank alike

        def find_newer() -> list[str]:
            if ranks.rank:
                return []
            living = [entry for entry in living_steps(self._storage) if entry.manifest]
            return [attempt for attempt, found in captured.items() if _is_newer(found.lineage, living)]

        newer = [captured[attempt] for attempt in run_on_all_ranks(ranks, find_newer)[0]]
        if not newer:
            return None
        newest = max(newer, key=lambda found: (found.is_whole, found.lineage.step))
        cards = captured_sets(self._run).get(newest.attempt, [])
        is_here = ranks.all_max([-len(cards)])[0] == -newest.world
        return Captured(newest.attempt, newest.lineage, newest.plan, cards, is_here, newest.is_whole)

    def steps(self) -> set[int]:
        """Return the steps that the memory of this host holds, whole or in part. Not collective."""
        return {cards[0].step for cards in captured_sets(self._run).values()}

    def _captured_sets(self, ranks: Ranks) -> dict[str, CapturedSet]:
        """Return the attempts whose captures survived on all ranks, or may have on hosts where no rank runs now."""

        def find() -> list[list[Any]]:
            if not self._leads or not self._storage.exists():  # a deleted root starts from nothing
                return []
            return [
                CapturedSet.of(attempt, cards).fields()
                for attempt, cards in captured_sets(self._run).items()
                if {rank for card in cards for rank in card.job.arena_bytes} == {card.rank for card in cards}
            ]

        merged: dict[str, CapturedSet] = {}
        for answer in run_on_all_ranks(ranks, find):
            for found in map(CapturedSet.from_fields, answer):
                known = merged.get(found.attempt)
                merged[found.attempt] = found if known is None else known.joined(found)
        return {attempt: found for attempt, found in merged.items() if found.is_whole or found.hosts > self._hosts}

    def adopt(self, ranks: Ranks, captured: Captured) -> None:
        """Write a captured state that is spread over hosts, from their memory; every rank returns or raises alike."""

        def write() -> None:
            if self._leads and captured.cards:
                self.write(captured)

        run_on_all_ranks(ranks, write)

    def write(self, captured: Captured) -> None:
        """Write the part of a captured state that this host has. Not collective; other hosts write theirs.

        The memory is freed once all of it is committed.
        """
        options = self._options
        order = SaveOrder(
            attempt=captured.attempt,
            folder=step_folder(captured.step),
            lineage=captured.lineage,
            deadline_s=options.deadline_s * _OF_DEADLINE,
            silence_s=options.silence_s,
            plan=captured.plan,
            keep=None if options.keep is None else options.keep.fields(),
        )
        _write(self._storage.address, order, captured.cards, options.writer_threads or min(_THREADS, cores()))

    def drop(self, ranks: Ranks) -> set[int]:
        """Delete the captured states of earlier starts, once no rank reads them; return their steps."""
        ranks.gather(None)
        return self.forget()

    def forget(self) -> set[int]:
        """Delete the captured states on this host. Not collective: no rank may be reading them."""
        return {step for step in startup_cleanup.clean_arenas(self._run) if step is not None}


def _is_newer(lineage: Lineage, living: Iterable[Committed]) -> bool:
    """Return True if a captured step is newer than every checkpoint, except for those that it abandons.

    It must descend from the newest of them: otherwise the run has continued elsewhere since.
    """
    left = {*lineage.abandons, *lineage.skips}
    others = [entry.step for entry in living if not is_left(entry, left)]
    parent = lineage.step if lineage.parent is None else lineage.parent
    return all(step < (lineage.step or 0) and step <= (parent or 0) for step in others)


def _write(address: str, order: SaveOrder, cards: list[Card], threads: int) -> None:
    """Have writer processes do the jobs of the cards again, each block checked against its digest."""
    outcomes: queue.Queue[SaveEnded | WriterGone] = queue.Queue()

    def hear(end: WriterClient, report: Report) -> None:
        if not isinstance(report, WriterEvent):
            outcomes.put(report)

    writers: list[WriterClient] = []
    failures: list[HoldfastError] = []
    try:
        for card in cards:
            writer = WriterClient(hear)
            writers.append(writer)
            writer.assign(_assignment(address, card, cards, max(1, threads // len(cards))))
            writer.order(order)
            writer.captured(order.attempt, card.values)
        end = time.monotonic() + order.deadline_s
        for _ in cards:
            try:
                report = outcomes.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise PeerFailed(f"step {order.step} was not written within {order.deadline_s:.0f} s") from None
            if isinstance(report, WriterGone):
                failures.append(PeerFailed(f"the writer process died: {report.why}"))
            elif report.outcome.failure is not None:
                failures.append(report.outcome.failure.error())
    finally:
        for writer in writers:
            writer.close(_LEAVE_S)  # one that has not left by then does so by itself
    if failures:
        raise failures[0]  # only now: no writer holds its arena any more, and a restore finds all of them


def _assignment(address: str, card: Card, cards: list[Card], threads: int) -> AssignJob:
    arenas = {other.rank: other.arena for other in cards}
    return AssignJob(
        address, card.job, card.commit, arenas, threads, card.root, reports=card.reports, arena_digest=card.arena_digest
    )
