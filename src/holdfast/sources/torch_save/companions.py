"""Files that trainers write next to a model (optimizer, scheduler, RNG states), added to its tree; Trainer's step.

transformers' Trainer and accelerate's `save_state` write them with torch.save. Readable files become groups and
values of the checkpoint. A file that cannot be read is reported in a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import HoldfastError
from holdfast.core.names import natural_key
from holdfast.sources.foreign import Folder, ReaderResult
from holdfast.sources.torch_save.archive import read_archive
from holdfast.sources.torch_save.trees import tree_of

_TORCH_FILE = re.compile(
    r"(?P<name>(?:optimizer|(?:lr_)?scheduler|scaler|rng_state|random_states|custom_checkpoint|sampler|dl_state_dict)"
    r"(?:_[0-9]{1,6})?)\.(?:pt|pth|bin|pkl)"
)
_MODEL_FILE = re.compile(r"pytorch_(?P<name>model_[0-9]{1,6})\.bin")  # accelerate's additional models
_TRAINER_STATE = "trainer_state.json"


@dataclass(slots=True)
class Companions:
    """The files next to a model, by name: trees of values and tensors, files in memory, files read, and notes."""

    trees: dict[str, Any] = field(default_factory=dict)
    made: dict[str, bytes] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    step: int | None = None

    def added_to(self, tree: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return a tree with the companions added. A companion is renamed if its name is already in the tree."""
        return {**tree, **{f"{name}.file" if name in tree else name: value for name, value in self.trees.items()}}

    def with_notes(self, result: ReaderResult) -> ReaderResult:
        """Return a reader's result with the step and the notes of the companions."""
        step = result.contents.step if result.contents.step is not None else self.step
        contents = replace(result.contents, step=step)
        return replace(result, contents=contents, notes=(*result.notes, *self.notes), read=result.read | self.read)


def is_companion(name: str) -> bool:
    """Return True if the name is that of a file that trainers write next to a model."""
    return _TORCH_FILE.fullmatch(name) is not None or name == "training_args.bin"


def read_companions(folder: Folder) -> Companions:
    """Return the files next to the model of a folder; empty for a single file."""
    companions = Companions()
    for name in sorted(folder.files, key=natural_key) if folder.only is None else ():
        match = _TORCH_FILE.fullmatch(name) or _MODEL_FILE.fullmatch(name)
        if match is None:
            continue
        companions.read.add(name)
        try:
            _add_torch(companions, folder, name, match["name"])
        except HoldfastError as error:
            companions.notes.append(f"left out: {error}")
    if _TRAINER_STATE in folder.files and folder.only is None:
        _add_trainer_state(companions, folder)
    return companions


def _add_torch(companions: Companions, folder: Folder, file: str, name: str) -> None:
    where = f"{folder.path}/{file}"
    reader = folder.open(file)
    try:
        tree, made = tree_of(read_archive(reader, where), file, reader, where)
    finally:
        reader.close()
    companions.trees[name] = tree
    companions.made |= made


def _add_trainer_state(companions: Companions, folder: Folder) -> None:
    """Add the step and the log of transformers' Trainer. Its JSON may contain NaN."""
    try:
        fields = json.loads(folder.read(_TRAINER_STATE, limits.JSON_BYTES))
    except (ValueError, RecursionError) as error:
        companions.notes.append(f"left out: {folder.path}/{_TRAINER_STATE}: not JSON: {error}")
        return
    if not isinstance(fields, dict):
        return
    companions.trees["trainer_state"] = fields
    companions.read.add(_TRAINER_STATE)
    step = fields.get("global_step")
    companions.step = step if type(step) is int and 0 <= step < 2**53 else None
