"""Reports on behalf of a writer process that died, so that the other ranks do not wait for it."""

from __future__ import annotations

import logging
import threading
import time

from holdfast.core.errors import HoldfastError
from holdfast.storage.base import SharedStorage
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import Failure, Outcome, RankReport, SaveOrder

_MAILBOX_S = 5.0
_LOG = logging.getLogger("holdfast")


class DeadWriterProxy:
    """A trainer in place of its dead writer: posts the failure, or as rank 0 the outcome."""

    def __init__(self, storage: SharedStorage, rank: int, world: int) -> None:
        self._storage = storage
        self._rank = rank
        self._world = world
        self._mailboxes: list[Mailbox] = []  # of failed attempts, to delete

    def report(self, order: SaveOrder, failure: HoldfastError) -> None:
        """Report the failure of this rank on a thread, because the storage may be slow."""
        threading.Thread(target=self._report, args=(order, failure), daemon=True).start()

    def _report(self, order: SaveOrder, error: HoldfastError) -> None:
        mailbox = Mailbox(self._storage, order.attempt)
        failure = Failure.of(error)
        try:
            if self._rank == 0:
                if not mailbox.names():
                    mailbox.make()
                self._mailboxes.append(mailbox)
                self._storage.discard(order.attempt)
                mailbox.post_outcome(Outcome(failure))
                return
            end = time.monotonic() + _MAILBOX_S
            while not mailbox.names() and time.monotonic() < end:
                time.sleep(self._storage.poll_s)  # rank 0's writer may be about to create the mailbox
            mailbox.post_report(self._rank, RankReport("", failure=failure))
        except HoldfastError as problem:
            _LOG.warning("step %s: the failure could not be reported to the other ranks: %s", order.step, problem)

    def sweep(self, wait_s: float = 0.0) -> None:
        """Delete the mailboxes of failed attempts once every rank has read the outcome, or after `wait_s`."""
        end = time.monotonic() + wait_s
        while self._mailboxes:
            if self._mailboxes[-1].count_seen() < self._world - 1 and time.monotonic() < end:
                time.sleep(self._storage.poll_s / 2)
                continue
            self._mailboxes.pop().discard()
