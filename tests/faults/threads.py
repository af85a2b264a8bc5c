"""Writers as threads of this process, so that a recorder of its system calls sees what they do."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from holdfast.writer.client import WriterClient
from holdfast.writer.messages import Report
from holdfast.writer.process import TrainerConnection, WriterProcess


class _Thread:
    """What a trainer asks of a process, answered by a thread."""

    pid = 0

    def __init__(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        raise AssertionError("a thread cannot be killed")


class ThreadClient(WriterClient):
    """A writer on a thread: the same messages on the same line."""

    def __init__(self, on_report: Callable[[WriterClient, Report], None]) -> None:
        self._on_report = on_report
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closing = False
        self._line, theirs = socket.socketpair()
        self._process: Any = _Thread(lambda: self._work(theirs))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @staticmethod
    def _work(line: socket.socket) -> None:
        with line:
            WriterProcess(TrainerConnection(line)).run()

    def exit_reason(self) -> str:
        return "the thread ended"


@contextmanager
def writers_on_threads() -> Iterator[None]:
    """While it lasts, Checkpointers start their writers as threads."""
    with patch("holdfast.engine.flight.WriterClient", ThreadClient):
        yield
