"""Ranks as threads of one process: small worlds without torch.distributed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
DEADLINE_S = 30.0


class _Meeting:
    """One place where all ranks of a world exchange values."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=DEADLINE_S)
        self.texts = [""] * world


class ThreadRanks:
    """One rank of a world of threads. Values travel as JSON, as they do between processes."""

    def __init__(self, rank: int, meeting: _Meeting, host: str) -> None:
        self.rank = rank
        self.world = len(meeting.texts)
        self._meeting = meeting
        self._host = host

    def gather(self, value: Any) -> list[Any]:
        self._meeting.texts[self.rank] = json.dumps(value)
        self._meeting.barrier.wait()
        values = [json.loads(text) for text in self._meeting.texts]
        self._meeting.barrier.wait()
        return values

    def all_max(self, values: Sequence[int]) -> list[int]:
        return [max(numbers) for numbers in zip(*self.gather(list(values)), strict=True)]

    def host(self) -> str:
        return self._host


def on_ranks(world: int, work: Callable[[ThreadRanks], T], hosts: Sequence[str] | None = None) -> list[T]:
    """Run `work` on every rank of a world, and return the results in rank order; raises the first error."""
    meeting = _Meeting(world)

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, meeting, hosts[rank] if hosts else "here"))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(run, rank) for rank in range(world)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
