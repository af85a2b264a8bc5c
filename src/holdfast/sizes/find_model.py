"""Find the model whose sizes are asked for: a module, a config.json, a checkpoint, or the newest step of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.catalog import newest_readable
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.core.warnings import warn
from holdfast.sizes.model_tensors import ModelTensors, model_of_checkpoint
from holdfast.sources import open_stored
from holdfast.storage import is_checkpoint, shared_storage_at

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model, and the bytes of each group of the checkpoint that it was found in."""

    model: ModelTensors
    stored: Mapping[str, int] = field(default_factory=dict)


def find_model(source: Any) -> FoundModel:
    """Return the model of a module, or of a path to a config.json, a checkpoint or a run. No tensor is read."""
    if not isinstance(source, str | os.PathLike):
        return FoundModel(_of_module(source))
    if "://" not in os.fspath(source):
        path = Path(source).expanduser()
        if not path.exists():
            raise NotFound(f"{source}: no such file or folder")
        if path.suffix == ".json" and path.name != f"model.safetensors.index{path.suffix}":
            return _of_config(path)
        if path.is_file():
            return _of_checkpoint(open_stored(path))
        if _is_config_alone(path):
            return _of_config(path / CONFIG)
    storage = shared_storage_at(source)
    if not is_checkpoint(storage):
        newest = newest_readable(storage, warn)
        if newest is not None:
            return _of_checkpoint(Checkpoint(storage, newest.folder))
    return _of_checkpoint(open_stored(source))


def _is_config_alone(folder: Path) -> bool:
    """Return True for a folder with a config.json and nothing that holds weights."""
    names = {path.name for path in folder.iterdir()}
    weights = any(name.endswith((".safetensors", ".bin", ".pdparams", ".distcp", "holdfast.json")) for name in names)
    return CONFIG in names and not weights and ".metadata" not in names


def _of_module(source: Any) -> ModelTensors:
    from torch import nn

    from holdfast.sizes.model_on_meta import model_of_module

    if not isinstance(source, nn.Module):
        raise InvalidArgument(f"the sizes of {type(source).__name__} are not known: give a path or a module")
    return model_of_module(source)


def _of_config(path: Path) -> FoundModel:
    from holdfast.sizes.model_on_meta import model_of_config

    return FoundModel(model_of_config(path))


def _of_checkpoint(checkpoint: Checkpoint) -> FoundModel:
    groups = checkpoint.contents.groups
    stored = {
        name: sum(found.bytes for key in group.tensors if (found := checkpoint.contents.find(name, key)) is not None)
        for name, group in groups.items()
    }
    return FoundModel(model_of_checkpoint(checkpoint), stored)
