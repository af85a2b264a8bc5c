"""The interface of ranks (gather, maximum, host), a single process, and errors raised on all ranks alike."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from holdfast.core.errors import HoldfastError, InvalidArgument, error_from_record, error_record

HOST_VARIABLE = "HOLDFAST_HOST"


def host_identity() -> str:
    """Return the boot and shared-memory identity of this machine, or the value of HOLDFAST_HOST."""
    override = os.environ.get(HOST_VARIABLE)
    if override:
        return override
    boot = Path("/proc/sys/kernel/random/boot_id")
    memory = Path("/dev/shm")
    identity = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{identity}/{memory.stat().st_dev}" if memory.exists() else f"{identity}/{os.getpid()}"


T = TypeVar("T")


class Ranks(Protocol):
    """The processes of one run. Exchanged values are JSON."""

    rank: int
    world: int

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order, on every rank."""

    def all_max(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise maximum of all ranks' numbers: a small message for any number of ranks."""

    def host(self) -> str:
        """Return the identity of this rank's host: ranks with equal identities share memory."""


class RankLinks(Protocol):
    """Messages of bytes between two ranks; `meet` raises PeerFailed, alike on every rank, if any was lost."""

    def send(self, rank: int, number: int, data: memoryview) -> bool: ...

    def receive(self, rank: int, number: int, data: memoryview) -> bool: ...

    def meet(self) -> None: ...


class SingleProcess:
    """A run with a single process."""

    rank = 0
    world = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def all_max(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def host(self) -> str:
        return "alone"


def run_on_all_ranks(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and gather the results; an error on one rank is raised on all ranks.

    No rank continues after another has failed, and none waits for a rank that will not come, so
    that errors do not become hangs. The results must be JSON.
    """
    failure: Exception | None = None
    point = sys._getframe(1).f_code.co_qualname
    answer: dict[str, Any]
    try:
        answer = {"value": work(), "at": point}
    except Exception as error:  # noqa: BLE001  (other ranks must learn of any error)
        failure = error
        answer = {"error": error_record(error)}
    if ranks.world == 1 and isinstance(failure, HoldfastError):
        raise failure
    answers = ranks.gather(answer)
    _raise_first(answers, failure)
    _require_one_point(answers)
    return [other["value"] for other in answers]


def raise_on_all_ranks(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work`, which checks this rank's arguments. Its error is raised on the others where they gather next.

    That must be in `run_on_all_ranks`. Without an error nothing is sent.
    """
    try:
        return work()
    except HoldfastError as error:
        failure = error

    def fail() -> None:
        raise failure

    run_on_all_ranks(ranks, fail)
    raise failure


def _require_one_point(answers: list[Any]) -> None:
    """Raise if the ranks gather different things: they were called differently."""
    points = [answer["at"] if isinstance(answer, dict) and "at" in answer else "a plain gather" for answer in answers]
    if len(set(points)) > 1:
        texts = "; ".join(f"rank {points.index(point)}: {point}" for point in sorted(set(points)))
        raise InvalidArgument(
            "the ranks are at different points; every rank must call save, load and restore in the same order, with "
            f"the same options ({texts})"
        )


def _raise_first(answers: list[Any], cause: Exception | None) -> None:
    """Raise the error of the first failed rank, naming all ranks with the same error."""
    failed = [
        (rank, answer["error"]) for rank, answer in enumerate(answers) if isinstance(answer, dict) and "error" in answer
    ]
    if not failed:
        return
    record = failed[0][1]
    alike = [rank for rank, other in failed if other == record]
    if len(answers) == 1 or len(alike) == len(answers):
        raise error_from_record(record) from cause
    where = "rank " + ", ".join(map(str, alike)) if len(alike) == 1 else "ranks " + ", ".join(map(str, alike))
    raise error_from_record([record[0], f"{where}: {record[1]}"]) from cause
