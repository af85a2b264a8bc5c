"""File names read from a checkpoint: plain, short, and never outside of their folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from holdfast.core import limits
from holdfast.core.errors import Damaged

MANIFEST = "holdfast.json"  # its presence commits the checkpoint
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*|\.metadata")  # torch's is the only hidden file
_DEVICES = frozenset({"con", "prn", "aux", "nul"} | {f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10)})


def is_plain(name: str) -> bool:
    """Return True if `name` consists of one or two harmless components."""
    parts = name.split("/")
    return len(name) <= limits.FILE_NAME_BYTES and len(parts) <= 2 and all(map(_is_harmless, parts))


def _is_harmless(part: str) -> bool:
    """Return True if the part is a file name on every system; "aux.json" is a device on some."""
    return _COMPONENT.fullmatch(part) is not None and part.partition(".")[0].lower() not in _DEVICES


def check_file(name: str, where: str) -> None:
    """Raise Damaged unless `name` is a plain file name that stays inside its folder."""
    if not is_plain(name):
        raise Damaged(f"{where}: {name[:80]!r} is not an allowed file name")


def manifest_attempt(manifest: bytes) -> str:
    """Return the attempt recorded in a manifest, which may be damaged; "" if there is none."""
    try:
        fields = json.loads(manifest)
    except (ValueError, RecursionError):
        return ""
    attempt = fields.get("attempt") if isinstance(fields, dict) else None
    return attempt if isinstance(attempt, str) else ""


def case_collision(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two names that are equal on case-insensitive file systems, or None."""
    folded: dict[str, str] = {}
    for name in names:
        if name.lower() in folded:
            return folded[name.lower()], name
        folded[name.lower()] = name
    return None


def check_case_collisions(names: Iterable[str], where: str) -> None:
    """Raise Damaged if two file names differ only by case: on some systems they are the same file."""
    collision = case_collision(names)
    if collision is not None:
        raise Damaged(f"{where}: the file names {collision[0]!r} and {collision[1]!r} differ only by case")
