"""Links of the Hugging Face cache: a snapshot's files are links to blobs beside it, and to nothing else."""

from __future__ import annotations

import os
import re
import stat

_BLOB = re.compile(r"(?:\.\./){2,3}blobs/[0-9a-f]{40}(?:[0-9a-f]{24})?")


def blob_of(name: str, folder: int) -> str | None:
    """The blob that a link in an open folder leads to, as a path from there; None for any other link."""
    try:
        target = os.readlink(name, dir_fd=folder)
    except OSError:  # no link; who opens the name hears what it is
        return None
    return target if _BLOB.fullmatch(target) else None


def blob_size(name: str, folder: int) -> int | None:
    """The size of the blob that a link leads to; None if it leads elsewhere, or to what is no file."""
    target = blob_of(name, folder)
    if target is None:
        return None
    try:
        status = os.stat(target, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
