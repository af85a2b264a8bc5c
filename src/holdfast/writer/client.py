"""The trainer's end of its writer process: start it, give it orders, hear of outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError, PeerFailed, error_record
from holdfast.writer.coordinator import Order

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main(int(sys.argv[2]), *sys.argv[3:])"

_SEND_S = 10
_WORDS_BYTES = 2000

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WriterProgram:
    """The module whose `main` a writer process runs, and the arguments that `main` takes after its socket."""

    module: str = "holdfast.writer.process"
    arguments: tuple[str, ...] = ()


_program = WriterProgram()


@contextlib.contextmanager
def writers_running(program: WriterProgram) -> Iterator[None]:
    """Start another program as the writers of this process, for tests of whole runs.

    Only code in this process can ask for it. An environment variable would also reach production jobs.
    """
    global _program  # noqa: PLW0603  (the Checkpointer that starts a writer has no argument for this)
    before, _program = _program, program
    try:
        yield
    finally:
        _program = before


class WriterEnd:
    """One writer process as its trainer sees it.

    `hear` is called on a thread of its own with this object and every message, and with {"tell": "gone"} when
    the process has ended.
    """

    def __init__(self, hear: Callable[[WriterEnd, Message], None]) -> None:
        self._hear = hear
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closing = False
        with tempfile.TemporaryFile() as log:
            self._log = os.dup(log.fileno())  # it lives as long as this object, closed or not
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
            # A session of its own: launchers kill process groups. Its output must not keep pipes open.
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

    def plan(self, fields: Mapping[str, Any]) -> None:
        """Hand over a job. It may be large, but nothing else is on the line then."""
        self._send({"do": "plan", "fields": dict(fields)})

    def arena(self, path: str) -> None:
        """Name an arena that the process takes away when it leaves, whether it was ever used or not."""
        self._send({"do": "arena", "path": path})

    def order(self, order: Order) -> None:
        self._send({"do": "order", "order": asdict(order)})

    def captured(self, attempt: str, values: Mapping[str, Any] | bytes) -> None:
        """Say that all is captured. `values` may be their JSON text already."""
        text = values if isinstance(values, bytes) else json.dumps(dict(values)).encode()
        self._write(b'{"do":"captured","attempt":%b,"values":%b}' % (json.dumps(attempt).encode(), text))

    def abandon(self, attempt: str, failure: HoldfastError) -> None:
        self._send({"do": "abandon", "attempt": attempt, "error": error_record(failure)})

    def _send(self, message: Message) -> None:
        self._write(json.dumps(message).encode())

    def _write(self, text: bytes) -> None:
        try:
            with self._lock:
                self._line.sendall(text)
                self._line.sendall(b"\n")
        except OSError as error:
            raise PeerFailed(f"the writer process is gone: {self.last_words()}") from error

    def _listen(self) -> None:
        with self._line.makefile("rb") as lines:
            try:
                for text in lines:
                    self._hear(self, json.loads(text))
            except (OSError, ValueError):
                pass  # the line broke in the middle of a word: the same as its end
        self._process.wait()
        self._line.close()
        self._hear(self, {"tell": "gone", "why": self.last_words()})

    def last_words(self) -> str:
        """Why the process ended, as far as it could say."""
        code = self._process.poll()
        begin = max(0, os.fstat(self._log).st_size - _WORDS_BYTES)
        text = os.pread(self._log, _WORDS_BYTES, begin).decode(errors="replace").strip().splitlines()
        return f"exit code {code}" + (f": {text[-1]}" if text else "")

    def kill(self) -> None:
        """End the process at once: what it is about is not known any more."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()

    def close(self, timeout_s: float) -> bool:
        """Ask the process to leave when it is done; False if it has not left in time."""
        if self._owner != os.getpid():
            return True  # a forked child: the writer is not its own
        if not self._closing:
            self._closing = True
            with contextlib.suppress(PeerFailed):  # it has left already
                self._send({"do": "close"})
        end = time.monotonic() + timeout_s
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        self._thread.join(max(0.0, end - time.monotonic()))
        return True
