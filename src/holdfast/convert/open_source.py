"""Open the source of a conversion by path: a checkpoint of any format, or a run's newest step, also Megatron's."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.checkpoint.catalog import newest_readable
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import NotFound
from holdfast.core.warnings import warn
from holdfast.sources import open_newest_iteration, open_stored
from holdfast.storage import is_checkpoint, shared_storage_at


def open_source(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint at a path or address, or the newest readable step if it is a run's root."""
    is_local = "://" not in os.fspath(path)
    if is_local and not Path(path).expanduser().exists():
        raise NotFound(f"{path}: no such file or folder")
    if is_local and Path(path).expanduser().is_file():
        return open_stored(path)
    root = shared_storage_at(path)
    if not is_checkpoint(root):
        newest = newest_readable(root, warn)
        if newest is not None:
            return Checkpoint(root, newest.folder)
        iteration = open_newest_iteration(path)
        if iteration is not None:
            return iteration
    return open_stored(path)
