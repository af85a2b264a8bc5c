"""Speaking for a writer that is dead, so that the others need not wait for it."""

from __future__ import annotations

import logging
import threading
import time

from holdfast.core.errors import HoldfastError, error_record
from holdfast.storage.base import SharedStorage
from holdfast.writer import mailbox as mail
from holdfast.writer.coordinator import Order
from holdfast.writer.mailbox import Mailbox

_MAILBOX_S = 5.0
_LOG = logging.getLogger("holdfast")


class StandIn:
    """A trainer in the place of its dead writer: reports the failure, or as rank 0 the outcome."""

    def __init__(self, storage: SharedStorage, rank: int, world: int) -> None:
        self._storage = storage
        self._rank = rank
        self._world = world
        self._left: list[Mailbox] = []

    def speak(self, order: Order, failure: HoldfastError) -> None:
        """Tell the others that this rank failed; on a thread, since that may take a while."""
        threading.Thread(target=self._speak, args=(order, failure), daemon=True).start()

    def _speak(self, order: Order, failure: HoldfastError) -> None:
        mailbox = Mailbox(self._storage, order.attempt)
        record = error_record(failure)
        try:
            if self._rank == 0:
                if not mailbox.names():
                    mailbox.make()
                self._left.append(mailbox)
                self._storage.discard(order.attempt)
                mailbox.post(mail.OUTCOME, {"error": record})
                return
            end = time.monotonic() + _MAILBOX_S
            while not mailbox.names() and time.monotonic() < end:
                time.sleep(self._storage.poll_s)  # rank 0's writer is about to make it
            mailbox.post(mail.report(self._rank), {"plan": "", "error": record})
        except HoldfastError as silent:
            _LOG.warning("step %s: the other ranks could not be told of a failure: %s", order.step, silent)

    def sweep(self, wait_s: float = 0.0) -> None:
        """Take away the mailboxes of dead writers, once every rank has heard of it or had the time to."""
        end = time.monotonic() + wait_s
        while self._left:
            heard = {name for name in self._left[-1].names() if name.startswith(mail.SEEN)}
            if len(heard) < self._world - 1 and time.monotonic() < end:
                time.sleep(self._storage.poll_s / 2)
                continue
            self._left.pop().discard()
