"""File names that may come out of a checkpoint: plain, short, and never leaving their folder."""

from __future__ import annotations

import re

from holdfast.core import limits
from holdfast.core.errors import Damaged

MANIFEST = "holdfast.json"  # its presence is the commit
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def is_plain(name: str) -> bool:
    """Whether `name` is made of one or two harmless components."""
    parts = name.split("/")
    return len(name) <= limits.FILE_NAME_BYTES and len(parts) <= 2 and all(map(_COMPONENT.fullmatch, parts))


def check_file(name: str, where: str) -> None:
    """Raise Damaged unless `name` is a plain file name that stays inside its folder."""
    if not is_plain(name):
        raise Damaged(f"{where}: {name[:80]!r} is not an allowed file name")
