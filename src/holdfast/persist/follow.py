"""Following a run from outside: the saves in flight under a root, by the notes of their writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.persist import mailbox as mail
from holdfast.persist.mailbox import Mailbox, attempt_of
from holdfast.storage.base import SharedStorage


@dataclass(frozen=True, slots=True)
class InFlight:
    """One save in flight: its step, how much is written, how many writers are done, what the slowest does."""

    attempt: str
    step: int | None
    world: int
    written: int
    total: int
    reported: int
    phase: str


def saves_in_flight(storage: SharedStorage) -> list[InFlight]:
    """Every save in flight, by attempt. A mailbox that goes while it is looked at is none."""
    found = []
    for folder in storage.hidden():
        attempt = attempt_of(folder)
        if attempt is not None:
            mailbox = Mailbox(storage, attempt)
            names = mailbox.names()
            if mail.BEGUN in names and mail.OUTCOME not in names:
                found.append(_look(attempt, mailbox, names))
    return found


def _look(attempt: str, mailbox: Mailbox, names: set[str]) -> InFlight:
    begun: dict[str, Any] = mailbox.read(mail.BEGUN) or {}
    words = [mailbox.read(name) or {} for name in sorted(names) if name.startswith("status-")]
    behind = min(words, key=lambda word: word.get("written", 0) / max(1, word.get("total", 1)), default={})
    return InFlight(
        attempt=attempt,
        step=begun.get("step"),
        world=begun.get("world", len(words)),
        written=sum(word.get("written", 0) for word in words),
        total=begun.get("bytes", 0),
        reported=sum(name.startswith("report-") for name in names),
        phase=str(behind.get("phase", "beginning")),
    )
