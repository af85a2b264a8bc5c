"""Following a run from outside: the saves in flight under a root, by the notes of their writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.storage.base import SharedStorage
from holdfast.writer import mailbox as mail
from holdfast.writer.mailbox import Mailbox, attempt_of

_NUMBERS = ("step", "world", "bytes", "written", "total")


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
            begun = _words(mailbox, mail.BEGUN) if mail.BEGUN in names else {}
            if begun and (mail.OUTCOME not in names or mailbox.outcome() is None):
                found.append(_look(attempt, mailbox, names, begun))
    return found


def _words(mailbox: Mailbox, name: str) -> dict[str, Any]:
    """What a note says; nothing if it is gone, or says what no writer says."""
    found = mailbox.read(name)
    if not isinstance(found, dict):
        return {}
    numbers = [found[name] for name in _NUMBERS if found.get(name) is not None]
    return found if all(type(number) is int and 0 <= number < 2**63 for number in numbers) else {}


def _look(attempt: str, mailbox: Mailbox, names: set[str], begun: dict[str, Any]) -> InFlight:
    words = [_words(mailbox, name) for name in sorted(names) if name.startswith("status-")]
    behind = min(words, key=lambda word: (word.get("written") or 0) / max(1, word.get("total") or 1), default={})
    return InFlight(
        attempt=attempt,
        step=begun.get("step"),
        world=begun.get("world") or len(words),
        written=sum(word.get("written") or 0 for word in words),
        total=begun.get("bytes") or 0,
        reported=sum(name.startswith("report-") for name in names),
        phase=str(behind.get("phase", "beginning")),
    )
