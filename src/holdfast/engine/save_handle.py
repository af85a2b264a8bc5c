"""Handles: one save in flight, as its caller sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import HoldfastError, TimedOut

_LATE_S = 30.0  # after the deadline, for word of it to come


class Refusal(Exception):
    """The call itself was wrong on some rank: it raises, instead of being a save that failed."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(str(error))
        self.error = error


class SaveHandle:
    """One save: whether it is done, what it gave, and how long the training loop waited for it."""

    def __init__(self, step: int, deadline_s: float) -> None:
        self.step = step
        self._end = time.monotonic() + deadline_s + _LATE_S
        self.stall_ms = 0.0
        self.seconds = 0.0  # from the call to the commit
        self.skipped = False
        self._over = threading.Event()
        self._opener: Callable[[], Checkpoint] | None = None
        self._checkpoint: Checkpoint | None = None
        self._error: HoldfastError | None = None

    def __repr__(self) -> str:
        outcome = "in flight"
        if self.done():
            outcome = "skipped" if self.skipped else "failed" if self._error else "saved"
        return f"SaveHandle(step={self.step}, {outcome}, stall_ms={self.stall_ms:.0f})"

    def done(self) -> bool:
        """Whether the save is over, well or not."""
        return self._over.is_set()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The committed checkpoint, once it is; raises what made the save fail.

        Raises TimedOut after `timeout` seconds, or if none are given after the deadline of saves.
        """
        if not self.wait(timeout):
            raise TimedOut(f"step {self.step} was not saved in time")
        if self._error is not None:
            raise self._error
        if self._checkpoint is None:
            assert self._opener is not None
            self._checkpoint = self._opener()
        return self._checkpoint

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save is over, well or not; False if it is not in time."""
        return self._over.wait(max(0.0, self._end - time.monotonic()) if timeout is None else timeout)

    @property
    def error(self) -> HoldfastError | None:
        """What made the save fail, if it did."""
        return self._error

    def succeed(self, opener: Callable[[], Checkpoint]) -> None:
        """For who saves: the checkpoint is committed."""
        self._opener = opener
        self._over.set()

    def fail(self, error: HoldfastError) -> None:
        """For who saves: there will be no checkpoint."""
        if not self._over.is_set():
            self._error = error
            self._over.set()
