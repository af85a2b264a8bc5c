"""Lineage: where a checkpoint stands in its run, and which other steps no longer belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Left = tuple[int, str]  # a step that was left, and the attempt that wrote it


@dataclass(frozen=True, slots=True)
class Lineage:
    """A step, the step it came from, what was measured, and what a restore left behind.

    `abandons` are later steps that a rewind gave up; `skips` are damaged ones that a restore
    passed over. Neither is of the living branch any more.
    """

    step: int | None
    parent: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    abandons: tuple[Left, ...] = ()
    skips: tuple[Left, ...] = ()

    def fields(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Lineage:
        """Out of the JSON form; raises KeyError, TypeError or ValueError for what is none."""
        metrics = dict(fields["metrics"])
        if not all(value is None or type(value) in (int, float) for value in metrics.values()):
            raise ValueError("metrics are not numbers by name")
        return Lineage(
            _step(fields["step"]),
            _step(fields["parent"]),
            metrics,
            _left(fields["abandons"]),
            _left(fields["skips"]),
        )


def _left(fields: Sequence[Sequence[Any]]) -> tuple[Left, ...]:
    return tuple((_step(step) or 0, str(attempt)) for step, attempt in fields)


def _step(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < 2**63):
        raise ValueError(f"{str(value)[:40]!r} is not a step")
    return value
