"""Checkpoints of any format, opened for reading: Holdfast's own, and those that other tools wrote.

A reader looks at a folder and says what it holds as Contents, or that the format is not its own.
Tensors stay where they are until they are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Damaged, NotFound, Unsupported
from holdfast.core.filenames import MANIFEST
from holdfast.sources.dcp.metadata import METADATA
from holdfast.sources.dcp.reader import read_dcp
from holdfast.sources.deepspeed import refuse_empty, refuse_file, refuse_folder
from holdfast.sources.foreign import Folder, Foreign, Found, seen_as
from holdfast.sources.huggingface import read_huggingface
from holdfast.sources.paddle.flex import read_flex
from holdfast.sources.paddle.pdiparams import read_inference
from holdfast.sources.paddle.pdparams import read_params
from holdfast.sources.paddle.unified import read_unified
from holdfast.sources.parts import refuse_megatron_folder, with_part_noted
from holdfast.sources.raw_bits import as_told_by_config
from holdfast.sources.scalars import read_scalars
from holdfast.sources.torch_save.reader import read_torch
from holdfast.sources.unread import with_unread_noted
from holdfast.storage import locate

__all__ = ["open_stored"]

READERS: tuple[Callable[[Folder], Found | None], ...] = (
    read_unified,
    read_flex,
    read_dcp,
    read_huggingface,
    read_params,
    read_inference,
    read_torch,
)


def open_stored(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any format that Holdfast reads: a folder, or a single file of tensors."""
    storage, name = locate(path)
    single = "://" not in str(path) and Path(path).expanduser().is_file()
    if single:  # who names a link means what it leads to
        storage, name = locate(os.path.realpath(Path(path).expanduser()))
    folder = Folder(storage, "", only=name) if single else Folder(storage, name)
    if not single and _has_manifest(folder):
        return Checkpoint(storage, name)
    if single:
        refuse_file(name, f"{folder.path}/{name}")
    for reader in READERS:
        found = reader(folder)
        if found is not None:
            refuse_empty(found.contents, folder.path)
            found = with_part_noted(folder, with_unread_noted(folder, as_told_by_config(folder, found)))
            return _with_step(Foreign(folder, found), found)
    if single:
        raise NotFound(f"{folder.path}/{name}: not a file of tensors that Holdfast reads")
    refuse_folder(folder.files, folder.path)
    refuse_megatron_folder(folder)
    _refuse_inner_dcp(folder)
    return Checkpoint(storage, name)


def _refuse_inner_dcp(folder: Folder) -> None:
    """Raise Unsupported for a folder that has no checkpoint but folders of torch DCP in it, as FSDP trainers write."""
    inner = sorted(name.removesuffix(f"/{METADATA}") for name in folder.files if name.endswith(f"/{METADATA}"))
    if inner:
        raise Unsupported(
            f"{folder.path}: no checkpoint by itself; {', '.join(inner[:4])} in it are folders of torch DCP: name one"
        )


def _with_step(checkpoint: Foreign, found: Found) -> Foreign:
    """The checkpoint with its step, read where it is a tensor of one number."""
    if found.step_at is None or len(found.step_at.sources()) != 1:
        return checkpoint
    step = read_scalars(checkpoint, {"step": found.step_at})["step"]
    if not step.is_integer() or not 0 <= step < 2**53:
        return checkpoint
    return seen_as(checkpoint, replace(found.contents, step=int(step)), {})


def _has_manifest(folder: Folder) -> bool:
    """Whether a folder has a manifest; one that is a link or a pipe is a damaged one, not none."""
    if MANIFEST in folder.files:
        return True
    try:
        folder.open(MANIFEST).close()
    except NotFound:
        return False
    except Damaged:
        return True
    return True
