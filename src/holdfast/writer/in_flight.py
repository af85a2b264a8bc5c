"""Saves in flight under a root, for `holdfast top`: progress and phase, from the notes of their writers."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.storage.base import SharedStorage
from holdfast.writer import mailbox as mail
from holdfast.writer.mailbox import Mailbox, attempt_of
from holdfast.writer.messages import SaveStarted, WriterStatus


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
