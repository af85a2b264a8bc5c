"""Small files copied with a model: configs, tokenizers, templates; a config.json given; its dtype after a cast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.megatron_extras import leads_to_hub
from holdfast.core import names
from holdfast.core.errors import HoldfastError
from holdfast.core.names import is_plain
from holdfast.format import strictjson
from holdfast.format.dtypes import DType
from holdfast.sources.foreign import Foreign

_NOT_COPIED = (".index.json", "trainer_state.json", "latest_checkpointed_iteration.txt")
_MEGATRON = "metadata.json"
_CONFIG = "config.json"
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_WITH_CONFIG = ("hf", "holdfast")  # formats that transformers opens


def side_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the small files of a checkpoint, except tensor files and Holdfast's own files."""
    if checkpoint.manifest.writer:
        return {name: checkpoint.read_file(name) for name in checkpoint.manifest.files if _is_copied(name)}
    if isinstance(checkpoint, Foreign):
        files = {name: checkpoint.read_side_file(name) for name in checkpoint.side_files() if _is_copied(name)}
        return {name: data for name, data in files.items() if name != _MEGATRON or not _is_megatrons(data)}
    return {}


def _is_megatrons(data: bytes) -> bool:
    """Return True for the metadata.json in which Megatron names the format of its tensors."""
    try:
        fields = strictjson.loads(data, _MEGATRON)
    except HoldfastError:
        return False
    return isinstance(fields, dict) and "sharded_backend" in fields


def _is_copied(name: str) -> bool:
    own = name in (names.MANIFEST, names.STATE, names.PROGRAM) or names.is_tensor_file(name)
    return is_plain(name) and not own and not name.endswith(_NOT_COPIED)


def with_config(files: Mapping[str, bytes], form: str, mapping: MappingOptions) -> dict[str, bytes]:
    """Return the files, with the config.json that the user gives for a source without one.

    Not for a built-in mapping away from the hub's names: from_pretrained would open the result, and give
    initial values to the weights that it does not find.
    """
    to_hub = mapping.written is None or leads_to_hub(mapping.written, reverse=mapping.reverse) is not False
    if mapping.config is None or _CONFIG in files or form not in _WITH_CONFIG or not to_hub:
        return dict(files)
    return {**files, _CONFIG: (json.dumps(mapping.config, indent=2, ensure_ascii=False) + "\n").encode()}


def with_dtype(files: Mapping[str, bytes], dtype: DType | None) -> dict[str, bytes]:
    """Return the files, with configs that name the dtype of the cast weights."""
    if dtype is None:
        return dict(files)
    return {
        name: _cast_config(data, name, dtype.name) if name.rpartition("/")[2] == _CONFIG else data
        for name, data in files.items()
    }


def _cast_config(data: bytes, name: str, dtype: str) -> bytes:
    config = strictjson.loads(data, name)
    if not isinstance(config, dict):
        return data
    _set_dtype(config, dtype)
    if not any(field in config for field in _DTYPE_FIELDS):
        config["torch_dtype"] = dtype
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype in a config and in the nested configs of composite models."""
    for field, value in config.items():
        if field in _DTYPE_FIELDS:
            config[field] = dtype
        elif isinstance(value, dict) and field.endswith("_config") and field != "quantization_config":
            _set_dtype(value, dtype)
