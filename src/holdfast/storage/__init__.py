"""Where bytes live: local files, memory. Knows folders and bytes, never a tensor."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core.errors import Unsupported
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage

__all__ = ["Storage", "storage_at"]


def storage_at(root: str | os.PathLike[str] | Storage) -> Storage:
    """The storage for a root: a path on this machine, or a Storage as it is."""
    if isinstance(root, Storage):
        return root
    text = os.fspath(root)
    if "://" in text:
        raise Unsupported(f"{text}: this version stores on local file systems only")
    return LocalStorage(Path(text))
