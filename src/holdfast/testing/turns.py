"""Threads that take turns at storage calls in an order drawn from a seed, for repeatable races.

Only one thread runs at a time. At each call it yields to a random unfinished thread, possibly
itself. The same seed gives the same order, as far as the work is deterministic.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from holdfast.testing.system import SystemCall
from holdfast.testing.watched import Gate

T = TypeVar("T")


class Turns(Gate):
    """A gate and a watcher of system calls at which threads yield; `order` lists the thread of each turn."""

    def __init__(self, seed: int, deadline_s: float = 60.0) -> None:
        self._random = random.Random(seed)  # noqa: S311  (repeatable, not secret)
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._now = -1
        self._local = threading.local()
        self.order: list[int] = []

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run each work on its own thread; return the results or errors in order.

        Raises TimeoutError if a thread waits for something that no other thread can provide now.
        """
        results: list[Any] = [None] * len(works)

        def work(number: int) -> None:
            self._local.number = number
            try:
                self._await(number)
                results[number] = works[number]()
            except Exception as error:  # noqa: BLE001  (returned to the caller)
                results[number] = error
            finally:
                self._leave(number)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(works))]
        self._waiting = list(range(len(works)))
        self._next()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._deadline_s)
            if thread.is_alive():
                raise TimeoutError(f"thread {threads.index(thread)} is still running after {self._deadline_s:.0f} s")
        return results

    def call(self, kind: str, where: str, work: Callable[[], T]) -> T:
        self._yield_turn()
        return work()

    def watch(self, call: SystemCall, work: Callable[[], Any]) -> Any:
        """Yield before each system call too; a watcher for `watched_system`."""
        self._yield_turn()
        return work()

    def _yield_turn(self) -> None:
        number = getattr(self._local, "number", None)
        if number is not None:  # threads that are not ours run freely
            with self._changed:
                self._next()
            self._await(number)

    def _await(self, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._now == number, self._deadline_s):
                raise TimeoutError(f"thread {number} did not get its turn within {self._deadline_s:.0f} s")

    def _next(self) -> None:
        with self._changed:
            self._now = self._random.choice(self._waiting) if self._waiting else -1
            self.order.append(self._now)
            self._changed.notify_all()

    def _leave(self, number: int) -> None:
        with self._changed:
            self._waiting.remove(number)
            self._next()
