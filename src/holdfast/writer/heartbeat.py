"""Heartbeats: status notes that change show other processes that an attempt is being written."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.errors import HoldfastError
from holdfast.core.host import host_identity
from holdfast.storage.base import SharedStorage
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import SaveStarted, WriterStatus

_BEAT_S, _FIRST_BEAT_S = 1.0, 0.1


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
