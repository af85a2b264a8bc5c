"""Lineage, as stored: a step, its parent, its metrics, and the steps that a restore abandoned or skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LeftStep = tuple[int, str]  # a step that was left behind, and the attempt that wrote it


@dataclass(frozen=True, slots=True)
class Lineage:
    """A step, its parent, its metrics, and the steps that a restore left behind.

    `abandons` are later steps given up by a rewind; `skips` are damaged steps that a restore
    skipped. Neither is on the living branch.
    """

    step: int | None
    parent: int | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    abandons: tuple[LeftStep, ...] = ()
    skips: tuple[LeftStep, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> Lineage:
        """Decode the JSON form; raises KeyError, TypeError or ValueError if it is invalid."""
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


def _left(fields: Sequence[Sequence[Any]]) -> tuple[LeftStep, ...]:
    return tuple((_step(step) or 0, str(attempt)) for step, attempt in fields)


def _step(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < 2**63):
        raise ValueError(f"{str(value)[:40]!r} is not a step")
    return value
