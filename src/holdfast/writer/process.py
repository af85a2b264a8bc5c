"""The writer process of a rank, without torch: its main loop, each save from order to outcome, its own end.

It maps the arenas of its host, gathers, digests and writes the blocks that it owns, and reports
through the storage. When its trainer is gone, it finishes what was captured and exits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

from holdfast.checkpoint.shared_memory import unlink_file
from holdfast.core.errors import HoldfastError, LayoutError, PeerFailed, error_from_record, error_record
from holdfast.core.events import Event
from holdfast.storage import Storage, storage_at
from holdfast.writer import mailbox as mail
from holdfast.writer.arena_card import card_path
from holdfast.writer.mailbox import Heartbeat, Mailbox, Watch
from holdfast.writer.messages import (
    AbandonSave,
    AddArena,
    AssignJob,
    CaptureDone,
    CloseWriter,
    Command,
    Failure,
    Outcome,
    SaveEnded,
    SaveOrder,
    Values,
    WriterEvent,
    decode_command,
    encode_report,
)
from holdfast.writer.write_attempt import AttemptWriter, Workspace

_ORPHAN_POLL_S = 0.2
_NICE = 5  # training comes first
_STUCK_S = 30.0  # a writer in a call that never returns exits this long after the deadline
_SEEN_S, _LAST_SEEN_S = 1.0, 10.0  # how long other ranks may take to read an outcome


class TrainerGone(Exception):
    """The trainer closed its end of the socket or died."""


class TrainerConnection:
    """The writer's end of the socket: commands come in, reports go out, one on each line."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._parent = os.getppid()
        self._received = bytearray()
        self._ready = select.poll()
        self._ready.register(line, select.POLLIN | select.POLLHUP)

    def receive(self) -> Command:
        """Wait for the next command; raises TrainerGone when there will be none."""
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            searched = len(self._received)
            if self._ready.poll(_ORPHAN_POLL_S * 1000):
                self._received += self._read()
            elif os.getppid() != self._parent:
                raise TrainerGone  # forked children of the trainer may keep the socket open
        command = decode_command(self._received[:end])
        del self._received[: end + 1]
        return command

    def _read(self) -> bytes:
        try:
            data = self._line.recv(1 << 20)
        except ConnectionResetError:
            raise TrainerGone from None  # the trainer died before it read all reports
        if not data:
            raise TrainerGone
        return data

    def send(self, report: WriterEvent | SaveEnded) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone: the work goes on
            self._line.sendall(encode_report(report) + b"\n")


class WriterProcess:
    """The main loop: commands are carried out until the trainer is gone and all work is done."""

    def __init__(self, trainer: TrainerConnection, open_storage: Callable[[str], Storage] = storage_at) -> None:
        self._trainer = trainer
        self._open_storage = open_storage
        self._workspace: Workspace | None = None
        self._missing: FileNotFoundError | None = None  # why there is no workspace for the last job
        self._unpublished = False  # whether the arena holds a captured state that was not published
        self._stall_ms: float | None = None  # of the save in work
        self._closing = False
        self._arenas: set[str] = set()

    def run(self) -> None:
        try:
            while not self._closing:
                command = self._trainer.receive()
                if isinstance(command, AssignJob):
                    self._assign(command)
                elif isinstance(command, SaveOrder):
                    self._save(command)
                else:
                    self._accept(command)
        except TrainerGone:
            pass  # captured states are written by now; the others were reported as failed
        self._leave()

    def _accept(self, command: Command) -> None:
        """Run a command that is valid at any time."""
        if isinstance(command, CloseWriter):
            self._closing = True
        elif isinstance(command, AddArena):
            self._arenas.add(command.path)

    def _assign(self, assignment: AssignJob) -> None:
        if self._workspace is not None:
            if self._workspace.coordinator is not None:
                self._workspace.coordinator.sweep(_SEEN_S, give_up=True)
            self._workspace.close()
        try:
            self._workspace = Workspace(assignment, self._open_storage)
        except FileNotFoundError as error:
            # The trainer plans ahead, and has replaced that arena by a larger one while this process started:
            # another job follows. If none does, the save raises the error.
            self._workspace, self._missing = None, error
            return
        self._unpublished = self._workspace.has_card()

    def _leave(self) -> None:
        """Delete the arenas, except one with a captured state that was not published."""
        if self._workspace is not None:
            if self._workspace.coordinator is not None:
                self._workspace.coordinator.sweep(_LAST_SEEN_S, give_up=True)
                self._workspace.coordinator.join()
            self._workspace.close()
            self._arenas.add(self._workspace.arena_path)
            if self._unpublished:
                self._arenas.remove(self._workspace.arena_path)
        for arena in self._arenas:
            unlink_file(card_path(arena))
            unlink_file(arena)

    def _save(self, order: SaveOrder) -> None:
        """Carry out one save, from the order to the outcome."""
        if self._workspace is None:
            assert self._missing is not None
            raise self._missing
        workspace, rank = self._workspace, self._workspace.job.rank
        mailbox = Mailbox(workspace.storage, order.attempt)
        self._unpublished = workspace.has_card()
        started = time.monotonic()
        stuck = threading.Timer(order.deadline_s + _STUCK_S, os._exit, (1,))
        stuck.daemon = True
        stuck.start()
        with Heartbeat(mailbox, rank, workspace.job.bytes) as heartbeat:
            failure = self._begin(workspace, order)
            writer = AttemptWriter(workspace, order, mailbox, heartbeat)
            values, failure = self._write(writer, order, failure)
            seconds = time.monotonic() - started
            self._trainer.send(WriterEvent(Event("written", order.step, rank, heartbeat.written, seconds)))
            heartbeat.phase = "waiting for the others"
            outcome = self._conclude(workspace, order, mailbox, failure, started)
        stuck.cancel()
        if workspace.coordinator is None:  # the coordinator waits until the other ranks have read the outcome
            with contextlib.suppress(HoldfastError):  # the mailbox is deleted anyway, a little later
                mailbox.post_seen(rank)
        self._keep_or_delete(writer, values, outcome)
        events: tuple[Event, ...] = ()
        if workspace.coordinator is not None:
            workspace.coordinator.sweep(_SEEN_S)
            events = workspace.coordinator.finish_retention()
        self._trainer.send(SaveEnded(order.attempt, outcome, self._unpublished, events))

    def _write(
        self, writer: AttemptWriter, order: SaveOrder, failure: HoldfastError | None
    ) -> tuple[Values | None, HoldfastError | None]:
        """Wait for the capture, and write this rank's share unless the attempt has failed to begin.

        Returns the captured values, or None after a failed capture, and the failure.
        """
        assert self._workspace is not None
        values = None
        try:
            values, self._stall_ms = self._captured_values(order.attempt)
            if failure is not None:
                raise failure
            if order.plan != self._workspace.job.plan:
                raise LayoutError("the state was captured by another plan than the one its writer has")
            writer.run(values)
        except (HoldfastError, OSError, TrainerGone) as error:
            if values is not None:
                self._unpublished = writer.keep_in_memory(values)
            failure = failure or _as_failure(error)
            writer.report_failure(failure)
        return values, failure

    def _keep_or_delete(self, writer: AttemptWriter, values: Values | None, outcome: Outcome) -> None:
        """Keep the captured state of a failed save in memory; delete the card of any other."""
        assert self._workspace is not None
        is_layout_error = outcome.failure is not None and outcome.failure.kind == LayoutError.__name__
        if outcome.failure is None or (is_layout_error and not writer.is_adopted):
            self._unpublished = False  # published, or not restorable
        elif values is not None and not self._unpublished:
            self._unpublished = writer.keep_in_memory(values)
        if not self._unpublished:
            unlink_file(card_path(self._workspace.arena_path))

    def _begin(self, workspace: Workspace, order: SaveOrder) -> HoldfastError | None:
        if workspace.coordinator is None:
            return None
        try:
            workspace.coordinator.begin(order)
        except (HoldfastError, OSError) as error:
            return _as_failure(error)
        return None

    def _captured_values(self, attempt: str) -> tuple[Values, float | None]:
        """Wait for the values that were captured with the tensors, and the stall; raises a failed capture's error."""
        while True:
            command = self._trainer.receive()
            if isinstance(command, CaptureDone) and command.attempt == attempt:
                assert not isinstance(command.values, bytes)
                return command.values, command.stall_ms
            if isinstance(command, AbandonSave) and command.attempt == attempt:
                raise command.failure.error()
            self._accept(command)

    def _conclude(
        self, workspace: Workspace, order: SaveOrder, mailbox: Mailbox, failure: HoldfastError | None, began: float
    ) -> Outcome:
        if workspace.coordinator is not None:
            if failure is None:
                try:
                    workspace.coordinator.finish(order, self._stall_ms)
                except (HoldfastError, OSError) as error:
                    failure = _as_failure(error)
            try:
                return workspace.coordinator.conclude(order, failure)
            except (HoldfastError, OSError) as error:
                return Outcome(Failure.of(failure or _as_failure(error)))
        try:
            if failure is not None and not mailbox.names():
                return Outcome(Failure.of(failure))  # rank 0's writer could not begin, so it will not conclude
            watch = Watch(mailbox, order.deadline_s, order.silence_s, began)
            watch.wait(lambda names: mail.OUTCOME in names, lambda names: [0], "the coordinator's outcome")
            outcome = mailbox.outcome()
            if outcome is None:
                raise PeerFailed("the outcome of the save was removed before this rank read it, or cannot be read")
            return outcome
        except (HoldfastError, OSError) as error:
            return Outcome(Failure.of(failure or _as_failure(error)))


def _as_failure(error: BaseException) -> HoldfastError:
    if isinstance(error, HoldfastError):
        return error
    if isinstance(error, TrainerGone):
        return PeerFailed("the trainer died before its state was captured")
    return error_from_record(error_record(error))


def main(line: int, open_storage: Callable[[str], Storage] = storage_at) -> None:
    """Run the writer of the trainer that holds the other end of the socket `line`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the writer exits when its work is done, not when a launcher tells it to
    os.nice(_NICE)
    with socket.socket(fileno=line) as connection:
        WriterProcess(TrainerConnection(connection), open_storage).run()
