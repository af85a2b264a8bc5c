"""The end of the process: handlers of SIGTERM and others, and of exit, that finish the save in flight."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Protocol

from holdfast.core.warnings import PendingWarnings

_POLL_S = 0.02


class _Saver(Protocol):
    @property
    def is_idle(self) -> bool: ...


class Termination:
    """A handler of SIGTERM that waits for the save in flight, then acts as the signal did before.

    The wait takes at most `grace_s`. As a context it defers the signal to the end of the block, so
    that no save is interrupted half-way. A signal that `accept_signal` accepts is a request and has no
    other effect; `signals` are further signals that may be requests.
    """

    def __init__(
        self,
        warnings: PendingWarnings,
        grace_s: float,
        accept_signal: Callable[[int], bool] = lambda number: False,
        signals: Iterable[int] = (),
    ) -> None:
        self._warnings = warnings
        self._grace_s = grace_s
        self._accept_signal = accept_signal
        self._signals = sorted({int(signal.SIGTERM), *signals})
        self._saver: weakref.ref[_Saver] | None = None
        self._before: dict[int, Any] = {}
        self._owner = os.getpid()
        self._finished = False
        self._is_deferring = False
        self._deferred: int | None = None

    def watch(self, saver: _Saver | None) -> None:
        """Set the saver whose save in flight is waited for, None if none exists."""
        self._saver = None if saver is None else weakref.ref(saver)

    def install(self) -> bool:
        """Install the handlers. Only the main thread can; elsewhere return False and change nothing."""
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self._signals}
        return bool(self._before)

    def remove(self) -> None:
        """Restore the previous handlers, except those that other code has replaced since."""
        if self._before and threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before or signal.SIG_DFL)
            self._before = {}

    def __enter__(self) -> None:
        self._is_deferring = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_deferring = False
        if self._deferred is not None:
            number, self._deferred = self._deferred, None
            self._handle(number, None)

    def _accepts(self, number: int) -> bool:
        """Return True if this or another Checkpointer of the process takes a signal as a request; ask each."""
        earlier = getattr(self._before.get(number), "__self__", None)
        accepted_earlier = isinstance(earlier, Termination) and earlier._accepts(number)
        return self._accept_signal(number) or accepted_earlier

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_own = self._owner == os.getpid()  # False in a forked child
        if is_own and self._accepts(number):
            return
        if self._is_deferring:
            self._deferred = number
            return
        before = self._before.get(number) or signal.SIG_DFL
        if is_own and number == signal.SIGTERM and self._before and not self._finished:
            self._finished = True
            try:
                self._finish()
            except Warning as warning:  # a filter may turn warnings into errors; the signal continues
                logging.getLogger("holdfast").warning("%s", warning)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _finish(self) -> None:
        """Wait for the save in flight. Polls: the interrupted code may hold any lock."""
        saver = None if self._saver is None else self._saver()
        end = time.monotonic() + self._grace_s
        while saver is not None and not saver.is_idle and time.monotonic() < end:
            time.sleep(_POLL_S)
        if saver is not None and not saver.is_idle:
            self._warnings.add(
                f"the save in flight was not written within {self._grace_s:.0f} s: its writer continues by itself"
            )
        self._warnings.emit()


class _Closable(Protocol):
    def close(self) -> None: ...


def close_at_exit(checkpointer: _Closable) -> None:
    """Close a Checkpointer when the interpreter exits, without keeping it alive."""
    known = weakref.ref(checkpointer)
    owner = os.getpid()

    def close() -> None:
        living = known()
        if living is not None and os.getpid() == owner:
            living.close()

    atexit.register(close)
    weakref.finalize(checkpointer, atexit.unregister, close)
