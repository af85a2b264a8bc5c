"""`ResumePoint`: what `resume_from_checkpoint` stands for, decided once for all ranks before Trainer reads anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from holdfast.api import open_checkpoint
from holdfast.checkpoint.catalog import committed_steps
from holdfast.core.errors import InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.core.names import MANIFEST, folder_step, step_folder
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.peek import Peek, peek_at
from holdfast.storage import is_address
from holdfast.storage.base import SharedStorage, Storage

STATE_FILE = "trainer_state.json"
RECORD = "trainer"  # the entry of the state with the fields of TrainerState


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A step to go on from: of this root (the newest, unless `chosen`), or a checkpoint elsewhere."""

    step: int
    path: str
    record: Mapping[str, Any]
    chosen: bool = False
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class NativeCheckpoint:
    """A folder that Trainer wrote without Holdfast: Trainer loads it."""

    path: str


def resume_point(found: Peek, *, chosen: bool = False, elsewhere: bool = False) -> ResumePoint:
    """Return the point of a checkpoint; raises Mismatch or Unsupported if Trainer cannot go on from it."""
    record = found.values.get(RECORD)
    if not isinstance(record, Mapping):
        raise Mismatch(
            f"{found.path} has no entry {RECORD!r} that this rank can read: it was not saved by a Trainer with "
            "Holdfast, or its ranks disagreed about the trainer's state; load the model with holdfast.load"
        )
    if record["model_only"]:
        raise Unsupported(
            f"{found.path} was saved with save_only_model=True: it has no optimizer, scheduler or random state to go "
            "on from. Load the model with holdfast.load or from_pretrained, and train without resume_from_checkpoint"
        )
    return ResumePoint(found.step, found.path, record, chosen, elsewhere)


def named_point(
    ranks: Ranks, storage: Storage, output_dir: str, given: str | os.PathLike[str]
) -> ResumePoint | NativeCheckpoint:
    """Return what a path given as `resume_from_checkpoint` names. Collective."""
    path, own_step = run_on_all_ranks(ranks, lambda: _locate(storage, output_dir, os.fspath(given)))[0]
    if own_step is None and path is not None and not _is_holdfast(path):
        return NativeCheckpoint(path)
    found = peek_at(ranks, lambda: open_checkpoint(path), None, verify=False)
    return resume_point(found, chosen=True, elsewhere=own_step is None)


def _locate(storage: Storage, output_dir: str, given: str) -> list[Any]:
    """Return the path of a checkpoint, and its step if it is one of this root's."""
    name = given.partition("?")[0].rstrip("/").rpartition("/")[2] if is_address(given) else Path(given).name
    step = folder_step(name)
    if is_address(given):
        own = step is not None and given.partition("?")[0].rstrip("/") == step_path(storage, step).partition("?")[0]
        return [given, step if own else None]
    path = Path(given).expanduser().absolute()
    if not path.is_dir():
        step = _checkpoint_number(name, PREFIX_CHECKPOINT_DIR)
        if step is None and path.parent.resolve() == Path(storage.name).resolve():
            step = _checkpoint_number(name, "step")
        own_path = None if step is None else step_path(storage, step)
        if step is not None and own_path is not None and _is_holdfast(own_path):
            return [own_path, step]
        raise NotFound(f"resume_from_checkpoint={given!r} is not a folder; {_steps_of(storage)}")
    if _is_holdfast(str(path)):
        own = step is not None and path.parent.resolve() == Path(storage.name).resolve()
        return [str(path), step if own else None]
    if (path / STATE_FILE).exists():
        return [str(path), None]
    raise InvalidArgument(
        f"resume_from_checkpoint={given!r} is neither a step of Holdfast (no {MANIFEST}) nor a checkpoint of Trainer "
        f"(no {STATE_FILE}); pass True for the newest step under {storage.name}"
    )


def step_path(storage: Storage, step: int) -> str:
    """Return the path or address of a step of a root; the options of an address stay behind its path."""
    address = storage.address if isinstance(storage, SharedStorage) else storage.name
    if not is_address(address):
        return f"{address.rstrip('/')}/{step_folder(step)}"
    root, mark, options = address.partition("?")
    return f"{root.rstrip('/')}/{step_folder(step)}{mark}{options}"


def native_checkpoints(output_dir: str) -> list[str]:
    """Return the folders that Trainer wrote without Holdfast, by step."""
    folder = Path(output_dir)
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if (path / STATE_FILE).exists()]
    found = [(_checkpoint_number(name, PREFIX_CHECKPOINT_DIR), name) for name in names]
    return [name for _, name in sorted((step, name) for step, name in found if step is not None)]


def _checkpoint_number(name: str, wanted: str) -> int | None:
    prefix, _, number = name.rpartition("-")
    return int(number) if prefix == wanted and number.isdecimal() else None


def _steps_of(storage: Storage) -> str:
    steps = ", ".join(str(entry.step) for entry in committed_steps(storage))
    return f"{storage.name} has step {steps}" if steps else f"{storage.name} has no steps"


def _is_holdfast(path: str) -> bool:
    return is_address(path) or (Path(path) / MANIFEST).exists()
