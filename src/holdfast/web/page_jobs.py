"""Jobs of the page: verification, statistics, comparisons. Few at a time, cancellable, each with a time limit."""

from __future__ import annotations

import secrets
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import HoldfastError, NotFound
from holdfast.web.http_request import BadRequest

_RUNNING = 4
_KEPT = 12


class JobStop(Exception):
    """Raised inside a job that was cancelled or whose time is over."""


@dataclass(slots=True)
class PageJob:
    """One piece of work and how far it is. The work calls `advance`, which ends it when it must end."""

    text: str
    limit_s: float
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: str = "running"
    total: int = 0
    done: int = 0
    result: Any = None
    error: dict[str, str] | None = None
    _cancelled: bool = False
    _began: float = field(default_factory=time.monotonic)

    def advance(self, count: int = 0) -> None:
        """Count progress; raises JobStop if the job was cancelled or its time is over."""
        self.done += count
        if self._cancelled or self.is_late:
            raise JobStop

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._began > self.limit_s

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """End the job at its next step."""
        self._cancelled = True

    def run(self, work: Callable[[PageJob], Any]) -> None:
        """Do the work; every outcome becomes the state of the job."""
        try:
            self.result = work(self)
            self.state = "cancelled" if self._cancelled else "done"
        except JobStop:
            self.state = "cancelled" if self._cancelled else "failed"
            self.error = {"kind": "TimedOut", "message": f"stopped after the limit of {self.limit_s:.0f} s"}
        except HoldfastError as error:
            self.state, self.error = "failed", {"kind": type(error).__name__, "message": str(error)}
        except Exception:  # noqa: BLE001  (the server stays up; the terminal shows what happened)
            traceback.print_exc(file=sys.stderr)
            message = "an unexpected error; the terminal of `holdfast serve` shows it"
            self.state, self.error = "failed", {"kind": "Unexpected", "message": message}

    def fields(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "state": self.state,
            "done": self.done,
            "total": self.total,
            "text": self.text,
            "result": self.result,
            "error": self.error,
        }


class JobTable:
    """The jobs of a server: at most four run, and the results of the last ones are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, PageJob] = OrderedDict()

    def start(self, text: str, limit_s: float, work: Callable[[PageJob], Any]) -> PageJob:
        """Start a job on a thread of its own; raises BadRequest if enough are running."""
        with self._lock:
            if sum(job.state == "running" for job in self._jobs.values()) >= _RUNNING:
                raise BadRequest(429, f"{_RUNNING} jobs are running; wait for one, or cancel one")
            job = PageJob(text, limit_s)
            self._jobs[job.id] = job
            for old in [old for old in self._jobs.values() if old.state != "running"][: len(self._jobs) - _KEPT]:
                del self._jobs[old.id]
        threading.Thread(target=job.run, args=(work,), name="holdfast-job", daemon=True).start()
        return job

    def get(self, job_id: str) -> PageJob:
        """Return a job; raises NotFound."""
        job = self._jobs.get(job_id)
        if job is None:
            raise NotFound("there is no such job; results are kept for a while only")
        return job

    def cancel_all(self) -> None:
        """End every job, before the server ends."""
        for job in list(self._jobs.values()):
            job.cancel()
