"""Where bytes live: local files, memory. Knows folders and bytes, never a tensor."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage

__all__ = ["Storage", "check_local", "storage_at"]


def storage_at(root: str | os.PathLike[str] | Storage) -> Storage:
    """The storage for a root: a path on this machine, or a Storage as it is."""
    if isinstance(root, Storage):
        return root
    if not isinstance(root, str | os.PathLike) or not isinstance(os.fspath(root), str):
        raise Unsupported(f"{root!r} is not a path, and not a storage")
    if not os.fspath(root):
        raise InvalidArgument("the root is an empty text: give a folder")
    check_local(os.fspath(root))
    return LocalStorage(Path(root).expanduser().absolute())


def check_local(path: str) -> None:
    """Refuse addresses: `s3://bucket` must not become a local folder of that name."""
    if "://" in path:
        raise Unsupported(f"{path}: this version stores on local file systems only")
