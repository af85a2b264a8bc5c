"""SIGTERM: finish the save in flight before the process goes, as preemption and launchers ask for."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any


class Termination:
    """A handler of SIGTERM that first finishes, then does what the signal did before.

    As a context it holds the signal back until the end, so that a save is never cut in two. A
    signal that `accept_signal` takes for a request does nothing else; `signals` are further ones that
    may be requests.
    """

    def __init__(
        self,
        finish: Callable[[], None],
        accept_signal: Callable[[int], bool] = lambda number: False,
        signals: Iterable[int] = (),
    ) -> None:
        self._finish = finish
        self._heed = accept_signal
        self._signals = sorted({int(signal.SIGTERM), *signals})
        self._before: dict[int, Any] = {}
        self._owner = os.getpid()
        self._finished = False
        self._held = False
        self._came: int | None = None

    def install(self) -> bool:
        """Take the signals over; only the main thread can, so elsewhere nothing changes, and the answer is no."""
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self._signals}
        return bool(self._before)

    def remove(self) -> None:
        """Put back what was there, unless somebody has put another handler in the meantime."""
        if self._before and threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before or signal.SIG_DFL)
            self._before = {}

    def __enter__(self) -> None:
        self._held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = False
        if self._came is not None:
            number, self._came = self._came, None
            self._handle(number, None)

    def _is_heeded(self, number: int) -> bool:
        """Whether a signal is a request, of this one or of another Checkpointer in this process; each hears it."""
        earlier = getattr(self._before.get(number), "__self__", None)
        theirs = isinstance(earlier, Termination) and earlier._is_heeded(number)
        return self._heed(number) or theirs

    def _handle(self, number: int, frame: FrameType | None) -> None:
        ours = self._owner == os.getpid()  # not in a forked child
        if ours and self._is_heeded(number):
            return
        if self._held:
            self._came = number
            return
        before = self._before.get(number) or signal.SIG_DFL
        if ours and number == signal.SIGTERM and self._before and not self._finished:
            self._finished = True
            try:
                self._finish()
            except Warning as warning:  # a user may have made warnings errors; the signal goes on
                logging.getLogger("holdfast").warning("%s", warning)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
