"""Checkpoints of any format, opened for reading: Holdfast's own, and those that other tools wrote.

A reader looks at a folder and says what it holds as Contents, or that the format is not its own.
Tensors stay where they are until they are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from holdfast.core.errors import NotFound
from holdfast.core.filenames import MANIFEST
from holdfast.persist.checkpoint import Checkpoint
from holdfast.sources.foreign import Folder, Foreign, Found
from holdfast.sources.paddle_flex import read_flex
from holdfast.sources.paddle_params import read_params
from holdfast.sources.paddle_unified import read_unified
from holdfast.storage import locate

__all__ = ["open_stored"]

READERS: tuple[Callable[[Folder], Found | None], ...] = (
    read_unified,
    read_flex,
    read_params,
)


def open_stored(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any format that Holdfast reads: a folder, or a single file of tensors."""
    storage, name = locate(path)
    single = isinstance(path, str | os.PathLike) and "://" not in str(path) and Path(path).is_file()
    folder = Folder(storage, "", only=name) if single else Folder(storage, name)
    if MANIFEST in folder.files and not single:
        return Checkpoint(storage, name)
    for reader in READERS:
        found = reader(folder)
        if found is not None:
            return Foreign(folder, found)
    if single:
        raise NotFound(f"{folder.path}/{name}: not a file of tensors that Holdfast reads")
    return Checkpoint(storage, name)
