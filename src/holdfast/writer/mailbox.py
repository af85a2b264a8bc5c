"""Mailboxes: notes of an attempt's writers in the storage, heartbeats, and the watch for silent writers.

No process group is needed, so writers go on after their trainers die. The notes of an attempt:
`host` (the host of rank 0's writer), `begun` (the files exist), `gave-R` (rank R's travel files are
complete), `status-R` (R is alive), `report-R` (the blocks that R wrote, or its error), `outcome`
(published or not), `seen-R` (R has read the outcome). A heartbeat changes the status note: it shows
other processes that the attempt is being written.

Notes are renamed into place and never synced: they are for processes that are alive. After a
power loss one may be empty, torn or full of zeros, so a note that cannot be read counts as absent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound, PeerFailed
from holdfast.core.ranks import host_identity
from holdfast.format import strictjson
from holdfast.storage.base import SharedStorage
from holdfast.writer.messages import Outcome, RankReport, SaveStarted, WriterStatus

_ATTEMPT, _MAIL = ".attempt-", ".mail-"
_FIRST_POLL_S = 0.002
_STATUS_POLL_S = 2.0
_LATE_S = 2.0  # for the outcome of a coordinator that gave up at the same deadline

HOST, BEGUN, OUTCOME = "host", "begun", "outcome"
_GAVE, _STATUS, _REPORT, _SEEN = "gave-", "status-", "report-", "seen-"
_BEAT_S, _FIRST_BEAT_S = 1.0, 0.1


def gave(rank: int) -> str:
    return f"{_GAVE}{rank}"


def status(rank: int) -> str:
    return f"{_STATUS}{rank}"


def report(rank: int) -> str:
    return f"{_REPORT}{rank}"


def seen(rank: int) -> str:
    return f"{_SEEN}{rank}"


def statuses(names: Collection[str]) -> list[str]:
    """Return the names of the status notes."""
    return sorted(name for name in names if name.startswith(_STATUS))


def reports(names: Collection[str]) -> list[str]:
    """Return the names of the report notes."""
    return sorted(name for name in names if name.startswith(_REPORT))


def rank_of(name: str) -> int | None:
    """Return the rank of a status note, None for another name."""
    text = name.removeprefix(_STATUS)
    return int(text) if text != name and text.isascii() and text.isdigit() and len(text) < 8 else None


def mail_folder(attempt: str) -> str:
    return _MAIL + attempt.removeprefix(_ATTEMPT)


def attempt_of(folder: str) -> str | None:
    """Return the attempt of a mailbox's folder, None for other folders."""
    return _ATTEMPT + folder.removeprefix(_MAIL) if folder.startswith(_MAIL) else None


class Mailbox:
    """The notes of one attempt."""

    def __init__(self, storage: SharedStorage, attempt: str) -> None:
        self._storage = storage
        self.folder = mail_folder(attempt)
        self.poll_s = storage.poll_s

    def make(self) -> None:
        self._storage.begin(self.folder)

    def post_host(self, host: str) -> None:
        self._post(HOST, strictjson.dumps(host))

    def post_begun(self, begun: SaveStarted) -> None:
        self._post(BEGUN, begun.note())

    def post_status(self, rank: int, writer: WriterStatus) -> None:
        self._post(status(rank), writer.note())

    def post_gave(self, rank: int, plan: str) -> None:
        self._post(gave(rank), strictjson.dumps(plan))

    def post_report(self, rank: int, written: RankReport) -> None:
        self._post(report(rank), written.note())

    def post_outcome(self, outcome: Outcome) -> None:
        self._post(OUTCOME, outcome.note())

    def post_seen(self, rank: int) -> None:
        self._post(seen(rank), strictjson.dumps(True))

    def _post(self, name: str, note: bytes) -> None:
        self._storage.note(self.folder, name, note)

    def names(self) -> set[str]:
        try:
            return set(self._storage.files(self.folder))
        except (NotFound, Damaged):
            return set()

    def read(self, name: str) -> Any | None:
        """Return the JSON value of a note, None if there is no note that can be read."""
        try:
            data = self._storage.read(self.folder, name, limits.JSON_BYTES)
            return strictjson.loads(data, f"{self.folder}/{name}")
        except (NotFound, Damaged):
            return None

    def host(self) -> str | None:
        """Return the host of rank 0's writer, None if it is unknown."""
        value = self.read(HOST)
        return value if isinstance(value, str) and value else None

    def begun(self) -> SaveStarted | None:
        return SaveStarted.decode(self.read(BEGUN))

    def report_of(self, rank: int) -> RankReport | None:
        return RankReport.decode(self.read(report(rank)))

    def outcome(self) -> Outcome | None:
        return Outcome.decode(self.read(OUTCOME))

    def count_seen(self) -> int:
        """Return how many ranks have read the outcome."""
        return sum(name.startswith(_SEEN) for name in self.names())

    def discard(self) -> None:
        self._storage.discard(self.folder)


class Watch:
    """Waits for notes, with a deadline, and notices silent writers.

    A writer renews its status about every second. A status counts as new if the note changed since
    this process last read it, so the clocks of hosts need not agree. The deadline counts from when
    the save `began`. A rank that starts to wait after the deadline still waits for a moment.
    """

    def __init__(self, mailbox: Mailbox, deadline_s: float, silence_s: float, began: float | None = None) -> None:
        now = time.monotonic()
        self._mailbox = mailbox
        self._end = max((now if began is None else began) + deadline_s, now + min(deadline_s, _LATE_S))
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._heard: dict[int, tuple[Any, float]] = {}
        self._check_at = time.monotonic() + _STATUS_POLL_S

    def wait(
        self, done: Callable[[set[str]], bool], waited_for: Callable[[set[str]], Collection[int]], what: str
    ) -> None:
        """Wait until `done` is true for the names of the notes; raises PeerFailed at the deadline.

        `waited_for` returns the ranks that still have work to do. If one falls silent, PeerFailed is raised early.
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
        """Raise PeerFailed at the deadline, or if one of the ranks has fallen silent."""
        now = time.monotonic()
        if now > self._end:
            raise PeerFailed(f"waiting for {what}: not there after {self._deadline_s:.0f} s")
        if now > self._check_at:
            self._check_at = now + _STATUS_POLL_S
            self._check_silence(waited_for, now, what)

    def _check_silence(self, ranks: Collection[int], now: float, what: str) -> None:
        for rank in ranks:
            note = self._mailbox.read(status(rank))
            known, since = self._heard.get(rank, (None, now))
            if note != known or rank not in self._heard:
                self._heard[rank] = (note, now)
            elif now - since > self._silence_s:
                raise PeerFailed(f"waiting for {what}: the writer of rank {rank} is silent for {now - since:.0f} s")


class Heartbeat:
    """Posts a writer's status about every second, and notices an outcome that another process posts."""

    def __init__(self, mailbox: Mailbox, rank: int, total: int) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._total = total
        self._end = threading.Event()
        self.written = 0
        self.phase = "waiting for the capture"
        self.stopped = False  # whether an outcome was posted
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._end.wait(_BEAT_S if number else _FIRST_BEAT_S):
            number += 1
            with contextlib.suppress(HoldfastError):  # the mailbox may not exist yet, or no longer
                if self._mailbox.outcome() is not None:
                    self.stopped = True
                self._mailbox.post_status(self._rank, WriterStatus(number, self.phase, self.written, self._total))


@contextmanager
def heartbeat(storage: SharedStorage, attempt: str, begun: SaveStarted) -> Iterator[None]:
    """Post a mailbox with heartbeats for an attempt that this process writes without a writer process."""
    mailbox = Mailbox(storage, attempt)
    mailbox.make()
    hold = storage.hold(mailbox.folder)
    try:
        mailbox.post_host(host_identity())
        mailbox.post_begun(begun)
        with Heartbeat(mailbox, 0, begun.total_bytes or 0) as beat:
            beat.phase = "writing"
            yield
    finally:
        hold.release()
        with contextlib.suppress(HoldfastError):  # the next start deletes the mailbox
            mailbox.discard()
