"""The writer process: one per rank, without torch. Takes orders from its trainer, and outlives it.

It maps the arenas of its host, gathers, digests and writes the blocks it owns, and reports
through the storage. When its trainer is gone, it finishes what was captured and leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.checkpoint.shared_memory import unlink_file
from holdfast.core.errors import HoldfastError, LayoutError, PeerFailed, error_from_record, error_record
from holdfast.core.events import Event
from holdfast.storage import Storage, storage_at
from holdfast.writer import mailbox as mail
from holdfast.writer.arena_card import card_path
from holdfast.writer.coordinator import Coordinator, Order
from holdfast.writer.mailbox import Mailbox, Watch
from holdfast.writer.write_attempt import Beat, Desk, Save

_ORPHAN_POLL_S = 0.2
_NICE = 5  # training comes first
_STUCK_S = 30.0  # after the deadline a writer is stuck in a call that never returns: it must not stay for ever
_SEEN_S, _LAST_WORD_S = 1.0, 10.0  # how long other ranks may take to notice an outcome


class TrainerGone(Exception):
    """The trainer closed its end or died."""


class Trainer:
    """The line to the trainer: one JSON message on each line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._parent = os.getppid()
        self._rest = bytearray()
        self._ready = select.poll()
        self._ready.register(line, select.POLLIN | select.POLLHUP)

    def receive(self) -> dict[str, Any]:
        """The next message; raises TrainerGone when there will be none."""
        searched = 0
        while (end := self._rest.find(b"\n", searched)) < 0:
            searched = len(self._rest)
            if self._ready.poll(_ORPHAN_POLL_S * 1000):
                self._rest += self._read()
            elif os.getppid() != self._parent:
                raise TrainerGone  # its forked children may still keep the line open
        message: dict[str, Any] = json.loads(self._rest[:end])
        del self._rest[: end + 1]
        return message

    def _read(self) -> bytes:
        try:
            data = self._line.recv(1 << 20)
        except ConnectionResetError:
            raise TrainerGone from None  # it died before it read all that it was told
        if not data:
            raise TrainerGone
        return data

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the work goes on
            self._line.sendall(json.dumps(message).encode() + b"\n")


class WriterProcess:
    """The process's life: plans, orders, captures, until the trainer is gone and all is done."""

    def __init__(self, trainer: Trainer, open_storage: Callable[[str], Storage] = storage_at) -> None:
        self._trainer = trainer
        self._open_storage = open_storage
        self._desk: Desk | None = None
        self._unpublished = False
        self._closing = False
        self._arenas: set[str] = set()

    def run(self) -> None:
        try:
            while not self._closing:
                message = self._trainer.receive()
                self._hear(message)
                if message["do"] == "plan":
                    self._plan(message["fields"])
                elif message["do"] == "order":
                    self._order(Order.from_fields(message["order"]))
        except TrainerGone:
            pass  # what was captured is written by now; what was not was reported as lost
        self._leave()

    def _hear(self, message: Mapping[str, Any]) -> None:
        """What the trainer may say at any time."""
        if message["do"] == "close":
            self._closing = True
        elif message["do"] == "arena":
            self._arenas.add(message["path"])

    def _plan(self, fields: Mapping[str, Any]) -> None:
        if self._desk is not None:
            if self._desk.coordinator is not None:
                self._desk.coordinator.sweep(_SEEN_S, give_up=True)
            self._desk.close()
        self._desk = Desk(fields, self._open_storage)

    def _leave(self) -> None:
        """Take the arenas away, but for one that holds what was captured and never published."""
        if self._desk is not None:
            if self._desk.coordinator is not None:
                self._desk.coordinator.sweep(_LAST_WORD_S, give_up=True)
                self._desk.coordinator.join()
            self._desk.close()
            self._arenas.add(self._desk.arena_path)
            if self._unpublished:
                self._arenas.remove(self._desk.arena_path)
        for arena in self._arenas:
            unlink_file(card_path(arena))
            unlink_file(arena)

    def _order(self, order: Order) -> None:
        """One save, from the order to its outcome."""
        assert self._desk is not None
        desk, rank = self._desk, self._desk.job.rank
        mailbox = Mailbox(desk.storage, order.attempt)
        self._unpublished = False
        started = time.monotonic()
        stuck = threading.Timer(order.deadline_s + _STUCK_S, os._exit, (1,))
        stuck.daemon = True
        stuck.start()
        with Beat(mailbox, rank, desk.job.bytes) as beat:
            failure = self._begin(desk, order)
            save = Save(desk, order, mailbox, beat)
            captured = False
            try:
                values = self._captured(order.attempt)
                captured = True
                if failure is not None:
                    raise failure
                if order.plan != desk.job.plan:
                    raise LayoutError("the state was captured by another plan than the one its writer has")
                save.run(values)
            except (HoldfastError, OSError, TrainerGone) as error:
                if captured:
                    self._unpublished = save.keep_in_memory(values)
                failure = failure or _as_failure(error)
                save.report_failure(failure)
            seconds = time.monotonic() - started
            self._trainer.tell(tell="event", event=Event("written", order.step, rank, beat.written, seconds).fields())
            beat.phase = "waiting for the others"
            outcome = self._conclude(desk, order, mailbox, failure, started)
        stuck.cancel()
        if desk.coordinator is None:  # which waits for the other ranks to have seen it
            with contextlib.suppress(HoldfastError):  # the mailbox goes anyway, a little later
                mailbox.post(mail.seen(rank), True)
        if outcome["error"] is None or outcome["error"][0] == LayoutError.__name__:
            self._unpublished = False  # published, or no state that could be restored
        elif captured and not self._unpublished:
            self._unpublished = save.keep_in_memory(values)
        if not self._unpublished:
            unlink_file(card_path(desk.arena_path))
        if desk.coordinator is not None:
            desk.coordinator.sweep(_SEEN_S)
            self._tell_news(desk.coordinator)
        self._trainer.tell(tell="outcome", attempt=order.attempt, outcome=outcome, kept=self._unpublished)

    def _tell_news(self, coordinator: Coordinator) -> None:
        """What retention did; what it took away is deleted while the next save begins."""
        for event in coordinator.news:
            self._trainer.tell(tell="event", event=event.fields())
        if any(event.name == "removed" for event in coordinator.news):
            coordinator.delete_removed()
        coordinator.news.clear()

    def _begin(self, desk: Desk, order: Order) -> HoldfastError | None:
        if desk.coordinator is None:
            return None
        try:
            desk.coordinator.begin(order)
        except (HoldfastError, OSError) as error:
            return _as_failure(error)
        return None

    def _captured(self, attempt: str) -> dict[str, Any]:
        """The values that were captured with the tensors; raises what made the capture fail."""
        while True:
            message = self._trainer.receive()
            if message["do"] == "captured" and message["attempt"] == attempt:
                return dict(message["values"])
            if message["do"] == "abandon" and message["attempt"] == attempt:
                raise error_from_record(message["error"])
            self._hear(message)

    def _conclude(
        self, desk: Desk, order: Order, mailbox: Mailbox, failure: HoldfastError | None, began: float
    ) -> dict[str, Any]:
        if desk.coordinator is not None:
            if failure is None:
                try:
                    desk.coordinator.finish(order)
                except (HoldfastError, OSError) as error:
                    failure = _as_failure(error)
            try:
                return desk.coordinator.conclude(order, failure)
            except (HoldfastError, OSError) as error:
                return {"error": error_record(failure or _as_failure(error))}
        try:
            watch = Watch(mailbox, order.deadline_s, order.silence_s, began)
            watch.wait(lambda names: mail.OUTCOME in names, lambda names: [0], "the coordinator's outcome")
            outcome = mailbox.outcome()
            if outcome is None:
                raise PeerFailed("the outcome of the save was removed before this rank read it, or cannot be read")
            return outcome
        except (HoldfastError, OSError) as error:
            return {"error": error_record(failure or _as_failure(error))}


def _as_failure(error: BaseException) -> HoldfastError:
    if isinstance(error, HoldfastError):
        return error
    if isinstance(error, TrainerGone):
        return PeerFailed("the trainer died before its state was captured")
    return error_from_record(error_record(error))


def main(line: int, open_storage: Callable[[str], Storage] = storage_at) -> None:
    """Run the writer whose trainer holds the other end of `line`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it leaves when its work is done, not when launchers tidy up
    os.nice(_NICE)
    with socket.socket(fileno=line) as connection:
        WriterProcess(Trainer(connection), open_storage).run()
