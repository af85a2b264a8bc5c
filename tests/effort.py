"""Limits on processor time that hold on a slow or busy machine too.

Wall-clock time says how busy a machine is. Processor time says it less, but a core that is shared
with another thread, or is throttled, takes up to a few times as long for the same work. So a limit
is given as on a quiet machine, and where it is passed, the same process does a fixed piece of work
and the limit grows by as much as that took longer than it should.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

REFERENCE_S = 0.05  # of `_work` on one quiet core of a machine of 2020


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if what is done within takes more processor time than a quiet machine needs for it."""
    started = time.process_time()
    yield
    problem = excess(time.process_time() - started, seconds)
    assert not problem, problem


def excess(took_s: float, limit_s: float) -> str:
    """Why work took too long; "" if it did not, by what this machine can do now."""
    if took_s <= limit_s:
        return ""
    slow = slowness()
    return "" if took_s <= limit_s * slow else f"it took {took_s:.1f} s of the processor, not {limit_s * slow:.1f} s"


def slowness() -> float:
    """How many times longer than on a quiet machine work takes now, at least 1."""
    return max(1.0, max(_work() for _ in range(3)) / REFERENCE_S)


def _work() -> float:
    """The processor time of what readers of checkpoints do most: parse JSON and go through lists."""
    started = time.process_time()
    text = json.dumps([{"offset": number, "name": str(number)} for number in range(15_000)])
    sorted(json.loads(text), key=lambda entry: entry["name"])
    return time.process_time() - started
