"""Events of saves and restores: the type, listeners guarded against their own errors, the default log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

_LOG = logging.getLogger("holdfast")
_LOG.addHandler(logging.NullHandler())  # without logging set up, failures show once, as warnings


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its name and step, the rank that reports it, the bytes involved and the seconds taken.

    `detail` is a text for people, and `at` the time as `time.time` gives it.

    Of saves: "planned", "captured", "written", "published", "failed", "skipped", "waited", "preempted",
    "cleaned", "removed", "set aside", "arena", "closing".

    Of a restart: "imported" (the age of the process when Holdfast was imported), "damaged" (a
    step that was skipped, and why), "load planned" (the checkpoint opened and matched with the live
    state), "reading" (every few seconds, the bytes so far), "read" (this rank's bytes from storage),
    "discovered" (what came before the load: cleaning up, finding the step, damaged steps), "restored" (all
    of it), "new run" (nothing was there to restore), "went back" (an earlier step was requested), "unrestored" (the
    memory has a state of another run).
    """

    name: str
    step: int | None = None
    rank: int = 0
    bytes: int = 0
    seconds: float = 0.0
    detail: str = ""
    at: float = field(default_factory=time.time)

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}: "
        size = (
            f" {self.bytes / 1e9:.2f} GB" if self.bytes >= 1e8 else f" {self.bytes / 1e6:.2f} MB" if self.bytes else ""
        )
        took = f" in {self.seconds:.2f} s" if self.seconds else ""
        rate = f" ({self.bytes / self.seconds / 1e9:.2f} GB/s)" if self.bytes >= 1e8 and self.seconds else ""
        return f"{step}{self.name}{size}{took}{rate}{': ' if self.detail else ''}{self.detail}"


_INFO = ("published", "restored", "new run", "preempted", "removed", "set aside", "went back", "closing", "damaged")
_WARNING = ("failed", "no identity", "unrestored")

Listener = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    """Listen to nothing."""


def safe_listener(listener: Listener) -> Listener:
    """Wrap a listener so that its errors are logged and do not stop a save or training."""

    def call(event: Event) -> None:
        try:
            listener(event)
        except Exception:  # noqa: BLE001  (user code may raise anything)
            _LOG.exception("a listener failed on the event %s", event)

    return call


def log_event(event: Event) -> None:
    """The default listener: logs one line per save and per problem to the logger "holdfast".

    Failures are also warned about in the training loop.
    """
    level = dict.fromkeys(_INFO, logging.INFO) | dict.fromkeys(_WARNING, logging.WARNING)
    _LOG.log(level.get(event.name, logging.DEBUG), "%s", event)
