"""Saves in flight under a root, for `holdfast top` and the page: progress and phase, from notes of writers."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.storage.base import SharedStorage
from holdfast.writer import mailbox as mail
from holdfast.writer.mailbox import Mailbox, attempt_of
from holdfast.writer.messages import SaveStarted, WriterStatus

_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class InFlight:
    """One save in flight: the bytes written, the number of writers that reported, the phase of the slowest."""

    attempt: str
    step: int | None
    world: int
    written: int
    total: int
    reported: int
    phase: str


@dataclass(frozen=True, slots=True)
class FlightRank:
    """One rank's writer in a save in flight. `beat` changes while it lives; `host` is known of rank 0 only."""

    rank: int
    host: str | None
    phase: str
    written: int
    total: int
    beat: int
    has_reported: bool
    problem: str | None = None


def saves_in_flight(storage: SharedStorage) -> list[InFlight]:
    """Return the saves in flight, by attempt. A mailbox deleted during the search counts as absent."""
    found = []
    for folder in storage.hidden():
        attempt = attempt_of(folder)
        if attempt is not None:
            mailbox = Mailbox(storage, attempt)
            names = mailbox.names()
            begun = mailbox.begun() if mail.BEGUN in names else None
            if begun is not None and (mail.OUTCOME not in names or mailbox.outcome() is None):
                found.append(_in_flight(attempt, mailbox, names, begun))
    return found


def _in_flight(attempt: str, mailbox: Mailbox, names: set[str], begun: SaveStarted) -> InFlight:
    writers = [WriterStatus.decode(mailbox.read(name)) for name in mail.statuses(names)]
    slowest = min(writers, key=lambda writer: writer.written / max(1, writer.total), default=WriterStatus())
    return InFlight(
        attempt=attempt,
        step=begun.step,
        world=begun.world or len(writers),
        written=sum(writer.written for writer in writers),
        total=begun.total_bytes or 0,
        reported=len(mail.reports(names)),
        phase=slowest.phase,
    )


def flight_ranks(storage: SharedStorage, attempt: str) -> list[FlightRank]:
    """Return the ranks of a save in flight, by rank; one without a note has done nothing yet."""
    mailbox = Mailbox(storage, attempt)
    names = mailbox.names()
    begun = mailbox.begun()
    world = min((begun.world if begun is not None else None) or 0, _MOST_RANKS)
    ranks = {*range(world), *(rank for name in mail.statuses(names) if (rank := mail.rank_of(name)) is not None)}
    return [_flight_rank(mailbox, names, rank) for rank in sorted(ranks)[:_MOST_RANKS]]


def _flight_rank(mailbox: Mailbox, names: set[str], rank: int) -> FlightRank:
    has_reported = mail.report(rank) in names
    note = WriterStatus.decode(mailbox.read(mail.status(rank))) if mail.status(rank) in names else WriterStatus()
    report = mailbox.report_of(rank) if has_reported else None
    failure = report.failure if report is not None else None
    return FlightRank(
        rank=rank,
        host=mailbox.host() if rank == 0 else None,
        phase=note.phase,
        written=note.written,
        total=note.total,
        beat=note.beat,
        has_reported=has_reported,
        problem=None if failure is None else f"{failure.kind}: {failure.message}",
    )
