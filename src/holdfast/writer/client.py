"""The trainer's end of its writer process: start, commands, reports, close; notes in place of a dead writer.

A writer that dies reports nothing. The trainer reports on its behalf, so that other ranks do not wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import HoldfastError, PeerFailed
from holdfast.storage.base import SharedStorage
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import (
    AbandonSave,
    AddArena,
    AssignJob,
    CaptureDone,
    CloseWriter,
    Command,
    Failure,
    Outcome,
    RankReport,
    Report,
    SaveOrder,
    Values,
    WriterGone,
    decode_report,
    encode_command,
)

_MAILBOX_S = 5.0
_LOG = logging.getLogger("holdfast")
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main(int(sys.argv[2]), *sys.argv[3:])"
_SEND_S = 10
_STDERR_BYTES = 2000


@dataclass(frozen=True, slots=True)
class WriterProgram:
    """The module whose `main` a writer process runs, and the arguments that `main` takes after its socket."""

    module: str = "holdfast.writer.process"
    arguments: tuple[str, ...] = ()


_program = WriterProgram()


@contextlib.contextmanager
def writers_running(program: WriterProgram) -> Iterator[None]:
    """Start another program as the writers of this process, for tests of whole runs.

    Only code in this process can do so. An environment variable would also reach production jobs.
    """
    global _program  # noqa: PLW0603  (the Checkpointer that starts a writer has no argument for this)
    before, _program = _program, program
    try:
        yield
    finally:
        _program = before


class WriterClient:
    """One writer process, as its trainer sees it.

    `on_report` is called on a thread with this object and every report. The last report is WriterGone.
    """

    def __init__(self, on_report: Callable[[WriterClient, Report], None]) -> None:
        self._on_report = on_report
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closing = False
        with tempfile.TemporaryFile() as log:
            self._log = os.dup(log.fileno())  # open as long as this object exists, closed or not
        weakref.finalize(self, os.close, self._log)
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        self._line = ours
        with theirs:
            self._process = self._start(theirs.fileno())
        self._thread = threading.Thread(target=self._listen, name="holdfast-writer", daemon=True)
        self._thread.start()

    def _start(self, line: int) -> subprocess.Popen[bytes]:
        program = _program
        command = [sys.executable, "-P", "-c", _START.format(program.module), _PACKAGE_ROOT, str(line)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            # A new session, because launchers kill process groups. Its output must not keep pipes open.
            return subprocess.Popen(  # noqa: S603  (this interpreter, running this package)
                [*command, *program.arguments],
                pass_fds=[line],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=environment,
            )
        except OSError as error:
            self._line.close()
            raise PeerFailed(
                f"the writer process cannot start ({sys.executable or 'sys.executable is empty'}): {error}; is the "
                "limit of processes or of memory reached?"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None and self._owner == os.getpid()

    def assign(self, assignment: AssignJob) -> None:
        """Send a job. It may be large, but no other command is on its way then."""
        self._send(assignment)

    def add_arena(self, path: str) -> None:
        """Name an arena that the process deletes when it exits, used or not."""
        self._send(AddArena(path))

    def order(self, order: SaveOrder) -> None:
        self._send(order)

    def captured(self, attempt: str, values: Values | bytes, stall_ms: float | None = None) -> None:
        """Report a complete capture. `values` may be JSON text already."""
        self._send(CaptureDone(attempt, values, stall_ms))

    def abandon(self, attempt: str, failure: HoldfastError) -> None:
        self._send(AbandonSave(attempt, Failure.of(failure)))

    def _send(self, command: Command) -> None:
        line = encode_command(command)
        try:
            with self._lock:
                self._line.sendall(line)
                self._line.sendall(b"\n")
        except OSError as error:
            raise PeerFailed(f"the writer process is gone: {self.exit_reason()}") from error

    def _listen(self) -> None:
        with self._line.makefile("rb") as lines:
            try:
                for line in lines:
                    self._on_report(self, decode_report(line))
            except (OSError, ValueError):
                pass  # a line that breaks off is treated as the end
        self._process.wait()
        self._line.close()
        self._on_report(self, WriterGone(self.exit_reason()))

    def exit_reason(self) -> str:
        """Return the exit code of the process and the last line that it printed."""
        code = self._process.poll()
        begin = max(0, os.fstat(self._log).st_size - _STDERR_BYTES)
        text = os.pread(self._log, _STDERR_BYTES, begin).decode(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {text[-1]}" if text else "")

    def kill(self) -> None:
        """Kill the process, because its state is unknown."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()

    def close(self, timeout_s: float) -> bool:
        """Ask the process to exit when its work is done; return False if it has not exited in time."""
        if self._owner != os.getpid():
            return True  # a forked child does not own the writer
        if not self._closing:
            self._closing = True
            with contextlib.suppress(PeerFailed):  # the process has exited already
                self._send(CloseWriter())
        end = time.monotonic() + timeout_s
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        self._thread.join(max(0.0, end - time.monotonic()))
        return True


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
