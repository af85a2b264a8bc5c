"""The same work on several threads at once, from one list of tasks, until it is done or one of them fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_on_threads(
    count: int,
    name: str,
    tasks: Iterable[T],
    work: Callable[[Iterator[T]], None],
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Run `work` on `count` threads, each with the iterator that all take their tasks from; raises the first error.

    After an error or an interrupt the iterator ends, so that the other threads end early; `stop` tells
    those with long tasks. A single thread is the caller's own; so is one that cannot be started, for
    example while the interpreter exits.
    """
    waiting = list(reversed(list(tasks)))

    def shared() -> Iterator[T]:
        while True:
            try:
                task = waiting.pop()  # one call of a list: no two threads get the same
            except IndexError:
                return
            yield task

    if count <= 1:
        work(shared())
        return
    with ThreadPoolExecutor(count, name) as pool:
        running: list[Future[None]] = []
        try:
            try:
                for _ in range(count):
                    running.append(pool.submit(work, shared()))
            except RuntimeError:  # the interpreter is exiting, or there are too many threads
                work(shared())
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
        except BaseException:
            waiting.clear()
            stop()
            raise
