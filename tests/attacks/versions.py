"""Manifests from the future, from versions that never were, and with fields gone or odd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.attack import Attack
from tests.attacks.forge import MODEL, forge_manifest

FUTURE: tuple[Any, ...] = ([2, 0], [2, 1], [3, 0], [10**6, 0], [2**63, 0], [10**300, 1])
NEVER: tuple[Any, ...] = ([0, 0], [0, 9], [-1, 0], [1, -1], [1], [], [1, 0, 0], None, 1, "1.0", [1.0, 0], [True, 1])
NEWER_MINOR: tuple[Any, ...] = ([1, 2], [1, 99], [1, 2**40])
FIELDS = ("format", "version", "step", "parent", "attempt", "created", "writer", "block_bytes", "groups", "files")
ODD: tuple[tuple[str, Any], ...] = (
    ("format", "other"),
    ("step", -1),
    ("step", "5"),
    ("step", True),
    ("parent", 2**63),
    ("block_bytes", None),
    ("groups", []),
    ("groups", {"model": None}),
    ("files", []),
    ("files", {MODEL: 5}),
    ("writer", None),
    ("metrics", [1]),
    ("metrics", {"loss": "low"}),
    ("metrics", {"loss": True}),
)


def _changed(name: str, change: Callable[[dict[str, Any]], object], *, harmless: bool = False) -> Attack:
    def plant(folder: Path) -> None:
        forge_manifest(folder, change)

    return Attack(name, plant, harmless=harmless)


def _without(field: str) -> Attack:
    return _changed(f"without {field}", lambda fields: fields.pop(field))


def _with(field: str, value: Any, *, harmless: bool = False) -> Attack:
    def change(fields: dict[str, Any]) -> None:
        fields[field] = value
        if harmless:  # a newer minor version may say more, and is read as far as it is understood
            fields["unknown"] = {"more": [1, None, "x"]}

    return _changed(f"{field} {str(value)[:40]}", change, harmless=harmless)


ATTACKS = (
    *(_with("version", version) for version in (*FUTURE, *NEVER)),
    *(_with("version", version, harmless=True) for version in (*NEWER_MINOR, [1, 0])),
    *map(_without, FIELDS),
    *(_with(field, value) for field, value in ODD),
)
