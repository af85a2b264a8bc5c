"""Leftovers: what an earlier life of a run left on its hosts. Writers at work, attempts, captured states."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import retention
from holdfast.checkpoint.catalog import Catalog, Committed, is_left, living_steps
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.retention_index import RetentionIndex
from holdfast.core.errors import HoldfastError, PeerFailed
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format.names import step_folder
from holdfast.storage.base import SharedStorage, Tracked
from holdfast.writer import startup_cleanup
from holdfast.writer.arena_card import Card, captured_sets
from holdfast.writer.arena_owner import Process, trainers
from holdfast.writer.client import WriterClient
from holdfast.writer.earlier_writers import wait_for_writers
from holdfast.writer.messages import AssignJob, Report, SaveEnded, SaveOrder, WriterEvent, WriterGone

_OF_DEADLINE = 0.8  # who writes gives up before the others give up waiting for it
_LEAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Captured:
    """A state that was captured on every rank and never published; `cards` are those of this host."""

    attempt: str
    lineage: Lineage
    plan: str
    cards: list[Card]
    is_here: bool  # all of it, for every rank that asks
    is_whole: bool  # on the hosts that run now

    @property
    def step(self) -> int:
        return self.lineage.step or 0


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What was done about an earlier life: attempts that nobody held, and the wait for its writers.

    `strangers` are living processes that save under the same root and are not of this run.
    `older` are arenas that a version without identities left for this path.
    """

    attempts: int
    waited_s: float
    strangers: list[str]
    older: list[str]


class Leftovers:
    """Finds, cleans and adopts what the lives of a run before this one left. Calls are collective."""

    def __init__(self, storage: SharedStorage, run: str, deadline_s: float) -> None:
        self._storage = storage
        self._run = run
        self._deadline_s = deadline_s
        self._leads = False  # whether this rank is the first of its host
        self._index = RetentionIndex(storage)
        self._hosts = 1

    @property
    def catalog(self) -> Catalog:
        """What is known of the steps under the root since the start, on rank 0."""
        return self._index.catalog

    def clean(self, ranks: Ranks, silence_s: float) -> Cleaned:
        """Wait for living writers, then remove what nobody holds and nobody can restore."""
        started = time.monotonic()
        dead: set[str] = set()

        def wait() -> None:
            first = ranks.rank == 0
            dead.update(wait_for_writers(self._storage, self._run, self._deadline_s, silence_s, look_at_storage=first))

        run_on_all_ranks(ranks, wait)
        waited_s = time.monotonic() - started
        own = Process.current()
        known_ranks: list[list[Any]] = run_on_all_ranks(ranks, lambda: [ranks.host(), own.pid, own.namespace])
        hosts = [host for host, _, _ in known_ranks]
        processes = {Process(pid, namespace) for _, pid, namespace in known_ranks}
        self._leads = hosts.index(hosts[ranks.rank]) == ranks.rank
        self._hosts = len(set(hosts))
        known = self._known(ranks)

        def clean() -> list[Any]:
            gone = self._clean_storage(dead) if ranks.rank == 0 else []
            if self._leads:
                kept = {arena for found in known.values() for arena in found["arenas"]}
                startup_cleanup.clean_arenas(self._run, kept.__contains__)
            strangers = trainers(self._run) - processes if self._leads else set()
            older = startup_cleanup.older_arenas(self._storage) if self._leads else []
            return [len(gone), sorted(map(str, strangers)), older]

        answers = run_on_all_ranks(ranks, clean)
        strangers = [process for _, found, _ in answers for process in found]
        return Cleaned(answers[0][0], waited_s, strangers, [path for _, _, found in answers for path in found])

    def _clean_storage(self, dead: Collection[str]) -> list[str]:
        """Attempts that are dead go, and what was removed or set aside in part is finished."""
        gone = startup_cleanup.clean_storage(self._storage, dead)
        retention.apply(self._storage, None, index=self._index)
        with contextlib.suppress(HoldfastError):  # it takes room, and no more; the next start tries again
            if isinstance(self._storage, Tracked):
                self._storage.sweep_some(left=True)
            else:
                self._storage.sweep()
        return gone

    def newest(self, ranks: Ranks) -> Captured | None:
        """The newest captured state that is newer than every checkpoint, if there is one.

        It may be incomplete: then other hosts have the rest, and no rank runs there now.
        """
        known = self._known(ranks)
        if not known:
            return None  # on every rank alike

        def look() -> list[str]:
            if ranks.rank:
                return []
            living = [entry for entry in living_steps(self._storage) if entry.manifest]
            return [attempt for attempt, found in known.items() if _is_newer(_lineage(found), living)]

        newer = {attempt: known[attempt] for attempt in run_on_all_ranks(ranks, look)[0]}
        if not newer:
            return None
        attempt = max(newer, key=lambda attempt: (newer[attempt]["whole"], newer[attempt]["lineage"]["step"]))
        found = newer[attempt]
        cards = captured_sets(self._run).get(attempt, [])
        everywhere = ranks.all_max([-len(cards)])[0] == -found["world"]
        return Captured(attempt, _lineage(found), found["plan"], cards, everywhere, found["whole"])

    def _known(self, ranks: Ranks) -> dict[str, dict[str, Any]]:
        """Attempts of which all ranks' captures survived, or may have, on hosts where nobody runs now."""

        def look() -> dict[str, Any]:
            if not self._leads:
                return {}
            if not self._storage.exists():
                return {}  # who deletes the root begins anew
            return {
                attempt: {
                    "lineage": cards[0].lineage.fields(),
                    "plan": cards[0].job.plan,
                    "world": cards[0].job.world,
                    "hosts": cards[0].job.hosts,
                    "ranks": [card.rank for card in cards],
                    "arenas": [card.arena for card in cards],
                }
                for attempt, cards in captured_sets(self._run).items()
                if {rank for card in cards for rank in card.job.arena_bytes} == {card.rank for card in cards}
            }

        merged: dict[str, dict[str, Any]] = {}
        for answer in run_on_all_ranks(ranks, look):
            for attempt, found in answer.items():
                if attempt in merged:
                    merged[attempt]["ranks"] += found["ranks"]
                    merged[attempt]["arenas"] += found["arenas"]
                else:
                    merged[attempt] = found
        for found in merged.values():
            found["whole"] = sorted(found["ranks"]) == list(range(found["world"]))
        known = {attempt: found for attempt, found in merged.items() if found["whole"] or found["hosts"] > self._hosts}
        return _without_twins(known)

    def adopt(self, ranks: Ranks, captured: Captured, threads: int, silence_s: float) -> None:
        """Write a captured state that is spread over hosts, from their memory; every rank returns or raises alike."""
        deadline_s = self._deadline_s * _OF_DEADLINE
        order = SaveOrder(
            captured.attempt,
            step_folder(captured.step),
            captured.lineage,
            deadline_s,
            silence_s,
            captured.plan,
        )

        def write() -> None:
            if self._leads and captured.cards:
                _write(self._storage.address, order, captured.cards, threads)

        run_on_all_ranks(ranks, write)

    def drop(self, ranks: Ranks) -> None:
        """What was left in memory has been restored or is not wanted."""
        ranks.gather(None)  # nobody reads it any more
        self.forget()

    def forget(self) -> None:
        """The same for this host alone, when it is known that nobody reads it. Not collective."""
        startup_cleanup.clean_arenas(self._run)


def _without_twins(known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Keep one of the whole states that are the same step of the same lineage.

    A start that restores a state from memory captures it again, to write it; where that fails,
    both are left. Every rank keeps the same one.
    """
    kept: dict[str, dict[str, Any]] = {}
    for attempt in sorted(known):
        found = known[attempt]
        twins = (other for other in kept.values() if other["whole"] and other["lineage"] == found["lineage"])
        if not found["whole"] or next(twins, None) is None:
            kept[attempt] = found
    return kept


def _lineage(found: Mapping[str, Any]) -> Lineage:
    return Lineage.from_fields(found["lineage"])


def _is_newer(lineage: Lineage, living: Iterable[Committed]) -> bool:
    """Whether a captured step is newer than every checkpoint, but for those that it gives up itself.

    It must have grown from the newest of them: else the run went on elsewhere since.
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

    writers = [WriterClient(hear) for _ in cards]
    try:
        for writer, card in zip(writers, cards, strict=True):
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
                raise PeerFailed(f"the writer process died: {report.why}")
            if report.outcome.failure is not None:
                raise report.outcome.failure.error()
    finally:
        for writer in writers:
            writer.close(_LEAVE_S)  # one that has not left by then does so by itself


def _assignment(address: str, card: Card, cards: list[Card], threads: int) -> AssignJob:
    arenas = {other.rank: other.arena for other in cards}
    return AssignJob(
        address, card.job, card.commit, arenas, threads, card.root, reports=card.reports, arena_digest=card.arena_digest
    )
