"""Symlinks of the Hugging Face cache. A snapshot's files are symlinks into the `blobs` folder, and nowhere else."""

from __future__ import annotations

import os
import re
import stat

_BLOB = re.compile(r"(?:\.\./){2,3}blobs/[0-9a-f]{40}(?:[0-9a-f]{24})?")


def blob_target(name: str, folder: int) -> str | None:
    """Return the relative path of the blob that a symlink in an open folder points to; None for any other symlink."""
    try:
        target = os.readlink(name, dir_fd=folder)
    except OSError:  # not a symlink; opening the name reports any error
        return None
    return target if _BLOB.fullmatch(target) else None


def blob_size(name: str, folder: int) -> int | None:
    """Return the size of the blob that a symlink points to; None if the target is not a regular blob file."""
    target = blob_target(name, folder)
    if target is None:
        return None
    try:
        status = os.stat(target, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
