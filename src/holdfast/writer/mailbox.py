"""Mailboxes: how the writers of a save talk, by small files in a folder of the storage.

No process group is needed, so trainers may die and writers go on. The notes of an attempt:
`host` (where rank 0's writer is), `begun` (files are there), `gave-R` (rank R's travel files are
whole), `status-R` (R is alive), `report-R` (what R wrote, or its error), `outcome` (published or
not), `seen-R` (R knows it).

Notes are renamed into place and never synced: they speak to processes that are alive. After a
power loss one may be empty, torn or full of zeros, so a note that cannot be read counts as absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, NotFound, PeerFailed
from holdfast.format import strictjson
from holdfast.storage.base import SharedStorage

_ATTEMPT, _MAIL = ".attempt-", ".mail-"
_FIRST_POLL_S = 0.002
_LOOK_S = 2.0
_LATE_S = 2.0  # for the word of who gave up at the same deadline

HOST, BEGUN, OUTCOME, SEEN = "host", "begun", "outcome", "seen-"


def gave(rank: int) -> str:
    return f"gave-{rank}"


def status(rank: int) -> str:
    return f"status-{rank}"


def report(rank: int) -> str:
    return f"report-{rank}"


def seen(rank: int) -> str:
    return f"{SEEN}{rank}"


def mail_folder(attempt: str) -> str:
    return _MAIL + attempt.removeprefix(_ATTEMPT)


def attempt_of(folder: str) -> str | None:
    """The attempt of a mailbox's folder, None for other folders."""
    return _ATTEMPT + folder.removeprefix(_MAIL) if folder.startswith(_MAIL) else None


class Mailbox:
    """The notes of one attempt."""

    def __init__(self, storage: SharedStorage, attempt: str) -> None:
        self._storage = storage
        self.folder = mail_folder(attempt)
        self.poll_s = storage.poll_s

    def make(self) -> None:
        self._storage.begin(self.folder)

    def post(self, name: str, value: Any) -> None:
        self._storage.note(self.folder, name, strictjson.dumps(value))

    def names(self) -> set[str]:
        try:
            return set(self._storage.files(self.folder))
        except (NotFound, Damaged):
            return set()

    def read(self, name: str) -> Any | None:
        """Return the value of a note, None if there is no note that can be read."""
        try:
            data = self._storage.read(self.folder, name, limits.JSON_BYTES)
            return strictjson.loads(data, f"{self.folder}/{name}")
        except (NotFound, Damaged):
            return None

    def fields(self, name: str) -> dict[str, Any] | None:
        """Return the fields of a note, None if there is no note with fields."""
        value = self.read(name)
        return value if isinstance(value, dict) else None

    def host(self) -> str | None:
        """Return the host of rank 0's writer, None if that is not known."""
        value = self.read(HOST)
        return value if isinstance(value, str) and value else None

    def report_of(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's report: its plan with its blocks and values, or with its error."""
        found = self.fields(report(rank))
        if found is None or not isinstance(found.get("plan"), str):
            return None
        if found.get("error"):
            return found if _is_error(found["error"]) else None
        whole = isinstance(found.get("blocks"), list) and isinstance(found.get("values"), dict)
        return found if whole else None

    def outcome(self) -> dict[str, Any] | None:
        """Return how the save ended: its "error", None if it was published."""
        found = self.fields(OUTCOME)
        if found is None or "error" not in found:
            return None
        return found if found["error"] is None or _is_error(found["error"]) else None

    def discard(self) -> None:
        self._storage.discard(self.folder)


def _is_error(record: Any) -> bool:
    """Return whether a value is an error as `error_record` writes it."""
    return isinstance(record, list) and len(record) == 2 and all(isinstance(text, str) for text in record)


class Watch:
    """Waits for notes, with a deadline, and notices writers that have fallen silent.

    A writer renews its status every second or so. What counts is that the note changes, by
    this process's own clock, so that the clocks of hosts need not agree. The deadline counts from
    when the save `began`, whatever was waited for before; who comes late looks for a moment all the same.
    """

    def __init__(self, mailbox: Mailbox, deadline_s: float, silence_s: float, began: float | None = None) -> None:
        now = time.monotonic()
        self._mailbox = mailbox
        self._end = max((now if began is None else began) + deadline_s, now + min(deadline_s, _LATE_S))
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._heard: dict[int, tuple[Any, float]] = {}
        self._look_at = time.monotonic() + _LOOK_S

    def wait(
        self, done: Callable[[set[str]], bool], waited_for: Callable[[set[str]], Collection[int]], what: str
    ) -> None:
        """Return once `done` of the notes that are there; raises PeerFailed at the deadline.

        `waited_for` says which ranks have to do something yet: if one is silent, they are not waited for.
        """
        pause = _FIRST_POLL_S
        while True:
            names = self._mailbox.names()
            if done(names):
                return
            self.check(waited_for(names), what)
            time.sleep(pause)
            pause = min(pause * 1.5, self._mailbox.poll_s)

    def check(self, waited_for: Collection[int], what: str) -> None:
        """Raise PeerFailed at the deadline, or if a rank that is waited for has fallen silent."""
        now = time.monotonic()
        if now > self._end:
            raise PeerFailed(f"waiting for {what}: not there after {self._deadline_s:.0f} s")
        if now > self._look_at:
            self._look_at = now + _LOOK_S
            self._listen(waited_for, now, what)

    def _listen(self, ranks: Collection[int], now: float, what: str) -> None:
        for rank in ranks:
            text = self._mailbox.read(status(rank))
            known, since = self._heard.get(rank, (None, now))
            if text != known or rank not in self._heard:
                self._heard[rank] = (text, now)
            elif now - since > self._silence_s:
                raise PeerFailed(f"waiting for {what}: the writer of rank {rank} is silent for {now - since:.0f} s")
