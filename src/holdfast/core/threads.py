"""The same work on several threads at once, until it is done or one of them fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_on_threads(count: int, name: str, work: Callable[[], None], stop: Callable[[], None]) -> None:
    """Run `work` on `count` threads and wait for all of them; raises the first error.

    `stop` is called after an error or an interrupt, so that the other threads end early. A single
    thread is the caller's own; so it is while the interpreter exits, when no thread can be started.
    """
    if count <= 1:
        work()
        return
    with ThreadPoolExecutor(count, name) as pool:
        try:
            running = [pool.submit(work) for _ in range(count)]
        except RuntimeError:  # the interpreter is exiting
            work()
            return
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
        except BaseException:
            stop()
            raise
