"""Ranks that act together: the few collective calls that saving and loading need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from holdfast.core.errors import HoldfastError, error_from_record, error_record

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of one run. Values that travel are JSON."""

    rank: int
    world: int

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""

    def highest(self, values: Sequence[int]) -> list[int]:
        """The highest of all ranks' numbers at each place: a short word between any number of ranks."""

    def host(self) -> str:
        """What tells this rank's host from others: ranks that answer alike share memory."""


class Alone:
    """A single process: the run is one rank."""

    rank = 0
    world = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def highest(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def host(self) -> str:
        return "alone"


def together(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank and gather what it returns; an error on one is an error on all.

    No rank goes on while another has failed, and none waits for one that will not come: that
    is what keeps errors from becoming hangs. What `work` returns must be JSON.
    """
    failure: Exception | None = None
    answer: dict[str, Any]
    try:
        answer = {"value": work()}
    except Exception as error:  # noqa: BLE001  (the others must hear of it, whatever it is)
        failure = error
        answer = {"error": error_record(error)}
    if ranks.world == 1 and isinstance(failure, HoldfastError):
        raise failure
    answers = ranks.gather(answer)
    _raise_first(answers, failure)
    return [other["value"] for other in answers]


def _raise_first(answers: list[Any], cause: Exception | None) -> None:
    """Raise the first rank's error, if any, naming the ranks that failed alike."""
    failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if not failed:
        return
    record = failed[0][1]
    alike = [rank for rank, other in failed if other == record]
    if len(answers) == 1 or len(alike) == len(answers):
        raise error_from_record(record) from cause
    where = "rank " + ", ".join(map(str, alike)) if len(alike) == 1 else "ranks " + ", ".join(map(str, alike))
    raise error_from_record([record[0], f"{where}: {record[1]}"]) from cause
