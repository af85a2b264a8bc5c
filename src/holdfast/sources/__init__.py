"""Open a checkpoint of any format by path: try the readers in order, Holdfast's own format and other tools'.

A reader inspects a folder and returns its contents as `Contents`, or None if the format is another one.
Tensors stay in their files until they are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from holdfast.checkpoint.catalog import newest_readable
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Damaged, NotFound, Unsupported
from holdfast.core.names import MANIFEST
from holdfast.core.warnings import warn
from holdfast.sources.dcp.dcp_folder import read_dcp
from holdfast.sources.dcp.metadata import METADATA
from holdfast.sources.deepspeed import reject_deepspeed_folder, reject_empty_weights, reject_rank_file
from holdfast.sources.foreign import Folder, Foreign, ReaderResult, with_contents
from holdfast.sources.huggingface import read_huggingface
from holdfast.sources.megatron_run import TRACKER, newest_iteration
from holdfast.sources.paddle.flex import read_flex
from holdfast.sources.paddle.pdiparams import read_inference
from holdfast.sources.paddle.pdparams import read_params
from holdfast.sources.paddle.unified import read_unified
from holdfast.sources.parts import note_partial, reject_megatron_folder
from holdfast.sources.raw_bits import apply_config_dtype
from holdfast.sources.scalars import read_scalars
from holdfast.sources.torch_save.torch_file import read_torch
from holdfast.sources.unread import note_unread
from holdfast.storage import is_address, is_checkpoint, locate, shared_storage_at

__all__ = ["open_source", "open_stored"]

READERS: tuple[Callable[[Folder], ReaderResult | None], ...] = (
    read_unified,
    read_flex,
    read_dcp,
    read_huggingface,
    read_params,
    read_inference,
    read_torch,
)


def open_stored(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint of any supported format: a folder or a single file of tensors."""
    storage, name = locate(path)
    single = "://" not in str(path) and Path(path).expanduser().is_file()
    if single:  # resolve a symlink to its target
        storage, name = locate(os.path.realpath(Path(path).expanduser()))
    folder = Folder(storage, "", only=name) if single else Folder(storage, name)
    if not single and _has_manifest(folder):
        return Checkpoint(storage, name)
    if single:
        reject_rank_file(name, f"{folder.path}/{name}")
    for reader in READERS:
        result = reader(folder)
        if result is not None:
            reject_empty_weights(result.contents, folder.path)
            result = note_partial(folder, note_unread(folder, apply_config_dtype(folder, result)))
            return _with_step(Foreign(folder, result), result)
    if single:
        raise NotFound(f"{folder.path}/{name}: not a tensor file that Holdfast can read")
    reject_deepspeed_folder(folder.files, folder.path)
    reject_megatron_folder(folder)
    _reject_inner_dcp(folder)
    return Checkpoint(storage, name)


def open_source(path: str | os.PathLike[str], report: Callable[[str], None] = warn) -> Checkpoint:
    """Open the checkpoint at a path or address, or the newest readable step of a run's root, also of Megatron's.

    `report` is called with a message about each step that cannot be read.
    """
    if not is_address(os.fspath(path)) and Path(path).expanduser().is_file():
        return open_stored(path)
    root = shared_storage_at(path)
    if not root.exists():
        raise NotFound(f"{path}: no such file or folder")
    if is_checkpoint(root):
        return open_stored(path)
    newest = newest_readable(root, report)
    if newest is not None:
        return Checkpoint(root, newest.folder)
    iteration = newest_iteration(path)
    if iteration is None:
        return open_stored(path)
    opened = open_stored(iteration)
    note = f"{path} is a Megatron run; read from its newest iteration, {iteration}"
    return opened.with_note(note) if isinstance(opened, Foreign) else opened


def _reject_inner_dcp(folder: Folder) -> None:
    """Raise Unsupported for a folder without a checkpoint that contains torch DCP folders, as FSDP trainers write."""
    inner = sorted(name.removesuffix(f"/{METADATA}") for name in folder.files if name.endswith(f"/{METADATA}"))
    if TRACKER in folder.files:
        raise Unsupported(f"{folder.path}: the root of a Megatron run; open one of its iterations, iter_...")
    if inner:
        raise Unsupported(
            f"{folder.path}: not a checkpoint; it contains the torch DCP folders {', '.join(inner[:4])}: open one"
        )


def _with_step(checkpoint: Foreign, result: ReaderResult) -> Foreign:
    """Return the checkpoint with its step, reading the step if it is a tensor of one element."""
    if result.step_at is None or len(result.step_at.sources()) != 1:
        return checkpoint
    step = read_scalars(checkpoint, {"step": result.step_at})["step"]
    if not step.is_integer() or not 0 <= step < 2**53:
        return checkpoint
    return with_contents(checkpoint, replace(result.contents, step=int(step)), {})


def _has_manifest(folder: Folder) -> bool:
    """Return True if a folder has a manifest. A symlink or pipe counts as a damaged manifest, not as absent."""
    if MANIFEST in folder.files:
        return True
    try:
        folder.open(MANIFEST).close()
    except NotFound:
        return False
    except Damaged:
        return True
    return True
