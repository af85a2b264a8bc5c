"""Opening what is to be converted: a checkpoint of any format, or the newest step of a run."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.checkpoint.catalog import newest_readable
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import NotFound
from holdfast.core.warnings import warn
from holdfast.sources import open_stored
from holdfast.storage import is_checkpoint, shared_storage_at


def open_source(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at a path or an address; the newest readable step if it is a run's root."""
    is_here = "://" not in os.fspath(path)
    if is_here and not Path(path).expanduser().exists():
        raise NotFound(f"{path}: there is nothing here to convert")
    if is_here and Path(path).expanduser().is_file():
        return open_stored(path)
    root = shared_storage_at(path)
    if not is_checkpoint(root):
        newest = newest_readable(root, warn)
        if newest is not None:
            return Checkpoint(root, newest.folder)
    return open_stored(path)
