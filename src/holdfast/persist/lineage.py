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
        return Lineage(
            fields["step"],
            fields["parent"],
            dict(fields["metrics"]),
            left_from(fields["abandons"]),
            left_from(fields["skips"]),
        )


def left_from(fields: Sequence[Sequence[Any]]) -> tuple[Left, ...]:
    """Steps and attempts out of their JSON form."""
    return tuple((step, attempt) for step, attempt in fields)
