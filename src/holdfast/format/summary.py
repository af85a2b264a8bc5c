"""Summaries of manifests, without files and blocks: the fields that listing, retention and restore use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ManifestSummary:
    """The fields of a manifest that listing, retention and restore use."""

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
    saved_by: str = ""

    @property
    def identity(self) -> str:
        """The attempt by which lineage, tags and captured states refer to the step, as in the manifest."""
        return self.saved_by or self.attempt

    @staticmethod
    def of(manifest: Manifest) -> ManifestSummary:
        return ManifestSummary(
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
            manifest.saved_by,
        )
