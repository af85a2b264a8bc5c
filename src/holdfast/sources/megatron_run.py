"""The root of a Megatron run: the iteration that its tracker file names."""

from __future__ import annotations

import os
import re

from holdfast.core.errors import Damaged, NotFound
from holdfast.sources.foreign import Folder
from holdfast.storage import locate
from holdfast.storage.base import Readable

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"  # what Megatron's converters write in place of a number
_TRACKER_BYTES = 64


def newest_iteration(path: str | os.PathLike[str]) -> str | None:
    """Return the path of the iteration that a Megatron run's tracker file names; None for another folder.

    Raises NotFound if the tracker names a folder that is missing.
    """
    storage, name = locate(path)
    folder = Folder(storage, name)
    if TRACKER not in folder.files:
        return None
    inner = _tracked(folder)
    plain, mark, options = os.fspath(path).partition("?") if "://" in os.fspath(path) else (os.fspath(path), "", "")
    try:
        Folder(storage, f"{name}/{inner}")
    except NotFound:
        raise NotFound(f"{path}: {TRACKER} names {inner}, which is missing; name an iteration that is there") from None
    return f"{plain.rstrip('/')}/{inner}{mark}{options}"


def tracked_folder(storage: Readable) -> str | None:
    """Return the name of the iteration's folder that the tracker file of a root names; None without that file."""
    try:
        folder = Folder(storage, "", only=TRACKER)
    except NotFound:
        return None
    return _tracked(folder)


def _tracked(folder: Folder) -> str:
    """Return the name of the folder that the tracker file names."""
    text = folder.read(TRACKER, _TRACKER_BYTES).decode("latin-1").strip()
    if text == _RELEASE:
        return _RELEASE
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise Damaged(f"{folder.path}/{TRACKER}: {text[:20]!r} is neither an iteration nor {_RELEASE!r}")
    return f"iter_{int(text):07d}"
