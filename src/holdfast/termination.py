"""SIGTERM: finish the save in flight before the process goes, as preemption and launchers ask for."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Termination:
    """A handler of SIGTERM that first finishes, then does what the signal did before.

    As a context it holds the signal back until the end, so that a save is never cut in two.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._before: Any = None
        self._installed = False
        self._owner = os.getpid()
        self._held = False
        self._came = False

    def install(self) -> None:
        """Take the signal over; only the main thread can, so elsewhere nothing changes."""
        if not self._installed and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Put back what was there, unless somebody has put another handler in the meantime."""
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._installed = False

    def __enter__(self) -> None:
        self._held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = False
        if self._came:
            self._came = False
            self._handle(signal.SIGTERM, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self._came = True
            return
        if self._installed and self._owner == os.getpid():  # not in a forked child, and once
            self._installed = False
            try:
                self._finish()
            except Warning as warning:  # a user may have made warnings errors; the signal goes on
                logging.getLogger("holdfast").warning("%s", warning)
        if callable(self._before):
            self._before(number, frame)
        elif self._before != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
