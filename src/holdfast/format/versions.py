"""Versions of the manifest: refuse newer majors, upgrade older ones by one patch per version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.errors import Damaged, Unsupported

CURRENT = (1, 1)

# From major version N to N + 1: one function each, tested with the golden checkpoints.
PATCHES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def upgrade(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Upgrade the fields of a manifest to the current version."""
    version = fields.get("version")
    if not isinstance(version, list) or len(version) != 2 or not all(type(n) is int and n >= 0 for n in version):
        raise Damaged(f"{where}: the version {str(version)[:40]!r} is not two numbers")
    major: int = version[0]
    if major > CURRENT[0]:
        raise Unsupported(
            f"{where}: written in format version {major}.{version[1]}, but this Holdfast reads only up to "
            f"{CURRENT[0]}.x: install a newer version"
        )
    while major < CURRENT[0]:
        if major not in PATCHES:
            raise Damaged(f"{where}: format version {major} never existed")
        fields = PATCHES[major](fields)
        major += 1
    return fields
