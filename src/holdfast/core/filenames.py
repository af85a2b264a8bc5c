"""File names that may come out of a checkpoint: plain, short, and never leaving their folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from holdfast.core import limits
from holdfast.core.errors import Damaged

MANIFEST = "holdfast.json"  # its presence is the commit
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*|\.metadata")  # the one hidden file is torch's
_DEVICES = frozenset({"con", "prn", "aux", "nul"} | {f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10)})


def is_plain(name: str) -> bool:
    """Whether `name` is made of one or two harmless components."""
    parts = name.split("/")
    return len(name) <= limits.FILE_NAME_BYTES and len(parts) <= 2 and all(map(_is_harmless, parts))


def _is_harmless(part: str) -> bool:
    """Whether it is a file on every system: "aux.json" is a device on some."""
    return _COMPONENT.fullmatch(part) is not None and part.partition(".")[0].lower() not in _DEVICES


def check_file(name: str, where: str) -> None:
    """Raise Damaged unless `name` is a plain file name that stays inside its folder."""
    if not is_plain(name):
        raise Damaged(f"{where}: {name[:80]!r} is not an allowed file name")


def attempt_named(manifest: bytes) -> str:
    """The attempt that a manifest says it was written by, "" if it does not say; it may be damaged all the same."""
    try:
        fields = json.loads(manifest)
    except (ValueError, RecursionError):
        return ""
    attempt = fields.get("attempt") if isinstance(fields, dict) else None
    return attempt if isinstance(attempt, str) else ""


def case_twins(names: Iterable[str]) -> tuple[str, str] | None:
    """Two of the names that are one file where case does not count, or None."""
    folded: dict[str, str] = {}
    for name in names:
        if name.lower() in folded:
            return folded[name.lower()], name
        folded[name.lower()] = name
    return None


def check_twins(names: Iterable[str], where: str) -> None:
    """Raise Damaged if two files have names that differ only by case: on some systems they are one."""
    twins = case_twins(names)
    if twins is not None:
        raise Damaged(f"{where}: the file names {twins[0]!r} and {twins[1]!r} differ only by case")
