"""Summaries of manifests: what describes a step among other steps, without its files and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Summary:
    """The fields of a manifest that listing, retention and restore decide by."""

    step: int | None
    parent: int | None
    attempt: str
    created: str
    total_bytes: int
    groups: tuple[str, ...]
    writer: Mapping[str, Any]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    abandons: tuple[tuple[int, str], ...] = ()
    skips: tuple[tuple[int, str], ...] = ()

    @staticmethod
    def of(manifest: Manifest) -> Summary:
        return Summary(
            manifest.step,
            manifest.parent,
            manifest.attempt,
            manifest.created,
            manifest.total_bytes,
            tuple(manifest.groups),
            manifest.writer,
            manifest.metrics,
            manifest.abandons,
            manifest.skips,
        )

    def fields(self) -> list[Any]:
        """Return the JSON form: the values in the order of the fields."""
        return [
            self.step,
            self.parent,
            self.attempt,
            self.created,
            self.total_bytes,
            list(self.groups),
            dict(self.writer),
            dict(self.metrics),
            [list(left) for left in self.abandons],
            [list(left) for left in self.skips],
        ]

    @staticmethod
    def from_fields(fields: Any) -> Summary:
        """Build a summary from its JSON form; raises KeyError, TypeError or ValueError for anything else."""
        step, parent, attempt, created, total_bytes, groups, writer, metrics, abandons, skips = fields
        texts = (attempt, created, *groups)
        numbers = (total_bytes, *(number for number in (step, parent) if number is not None))
        if any(type(text) is not str for text in texts) or any(type(number) is not int for number in numbers):
            raise TypeError("a summary has texts and whole numbers")
        if type(writer) is not dict or type(metrics) is not dict:
            raise TypeError("a summary has its writer and its metrics by name")
        return Summary(
            step, parent, attempt, created, total_bytes, tuple(groups), writer, metrics, _left(abandons), _left(skips)
        )


def _left(fields: Any) -> tuple[tuple[int, str], ...]:
    return tuple((int(step), str(attempt)) for step, attempt in fields)
