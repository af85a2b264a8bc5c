"""`SaveRequest`, the checked arguments of a save (step, state, metrics, files), and `SaveHandle`, its outcome."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import HoldfastError, InvalidArgument, TimedOut, Unsupported
from holdfast.engine.extra_files import read_files
from holdfast.keep import check_metrics

_LATE_S = 30.0  # after the deadline, for the outcome to arrive
_LAST_STEP = 2**62  # ranks compare steps as 64-bit integers


class InvalidCall(Exception):
    """A call that was wrong on some rank. `save` raises its error instead of returning a failed handle."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of one call of `save`, checked on this rank; `error` is set if they are wrong.

    The error is a value, because all ranks must learn of it together.
    """

    step: int
    state: MutableMapping[str, Any]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    error: Exception | None = None
    called_s: float = field(default_factory=time.perf_counter, compare=False)  # when the call began, on perf_counter

    @staticmethod
    def of(step: Any, state: Any, metrics: Any, files: Any = None, closed: HoldfastError | None = None) -> SaveRequest:
        """Check the arguments of a call; `closed` is the error of a Checkpointer that saves no more."""
        try:
            if closed is not None:
                raise closed
            check_state(state)
            contents = {} if files is None else read_files(files, state)
            return SaveRequest(check_step(step), state, check_metrics(metrics), contents)
        except Exception as error:  # noqa: BLE001  (other ranks must learn of any error)
            return SaveRequest(_known_step(step), state, error=error)

    def require_valid(self) -> None:
        if self.error is not None:
            raise self.error


def _known_step(step: Any) -> int:
    """Return the step of a wrong call, for messages; 0 if the step is wrong."""
    try:
        return check_step(step)
    except InvalidArgument:
        return 0


def check_state(state: Any) -> None:
    """Raise Unsupported unless the state is a mutable mapping."""
    if not isinstance(state, MutableMapping):
        raise Unsupported(f"the state is a {type(state).__name__}: give a dict of objects to save, by name")


def check_step(step: Any) -> int:
    """Return the step as an int; raises InvalidArgument if it is not a step."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or operator.index(step) < 0:
        raise InvalidArgument(f"step={step!r} is not a whole number of at least 0")
    if operator.index(step) > _LAST_STEP:
        raise InvalidArgument(f"step={step!r} is larger than the largest step, {_LAST_STEP}")
    return operator.index(step)


class SaveHandle:
    """One save: its outcome, and how long the training loop waited for it."""

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
        """Return True once the save has been committed or has failed."""
        return self._over.is_set()

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Return the committed checkpoint, or raise the error of the save.

        Raises TimedOut after `timeout` seconds, by default after the deadline of saves.
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
        """Wait until the save has been committed or has failed; return False after `timeout` seconds."""
        return self._over.wait(max(0.0, self._end - time.monotonic()) if timeout is None else timeout)

    @property
    def error(self) -> HoldfastError | None:
        """The error of a failed save."""
        return self._error

    def succeed(self, opener: Callable[[], Checkpoint]) -> None:
        """Set the outcome: the checkpoint has been committed."""
        self._opener = opener
        self._over.set()

    def fail(self, error: HoldfastError) -> None:
        """Set the outcome: there will be no checkpoint."""
        if not self._over.is_set():
            self._error = error
            self._over.set()
