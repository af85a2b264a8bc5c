"""A few worker threads that answer requests for the event loop; they end with the process, whatever they wait for."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class PageWorkers:
    """Threads that run functions for coroutines."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        self._started = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run a function on a thread and return its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._tasks.put((work, future))
        if self._started < self.threads:
            self._started += 1
            threading.Thread(target=self._work, name="holdfast-page", daemon=True).start()
        return await future

    def _work(self) -> None:
        while True:
            work, future = self._tasks.get()
            if not future.cancelled():
                _finish(future, work)


def _finish(future: asyncio.Future[Any], work: Callable[[], Any]) -> None:
    loop = future.get_loop()
    result: Any = None
    error: BaseException | None = None
    try:
        result = work()
    except BaseException as problem:  # noqa: BLE001  (the coroutine that waits raises it)
        error = problem

    def hand_over() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    if not loop.is_closed():
        loop.call_soon_threadsafe(hand_over)
