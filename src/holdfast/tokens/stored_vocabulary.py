"""The tensors of a checkpoint with a row for each token, found by the model's config and the usual names."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.core.names import group_folder
from holdfast.format import strictjson
from holdfast.plan.contents import Contents, Group
from holdfast.plan.subclass_keys import StoredSubclasses

CONFIG = "config.json"
FIELD = "vocab_size"
_NAMES = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared|lm_head|embed_out|output"
    r"|output_layer)\.(?:weight|bias)"
)
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class StoredVocabulary:
    """The vocabulary of one module of a checkpoint: its rows, and the keys of the tensors that have them."""

    group: str
    rows: int
    keys: tuple[str, ...]


def vocabulary_of(
    name: str, contents: Contents, files: Mapping[str, bytes], patterns: Sequence[str]
) -> StoredVocabulary:
    """Return the vocabulary of a module. `patterns` name its tensors where their names are not the usual ones.

    Raises NotFound if none is found, and Unsupported for tensors that cannot get other rows.
    """
    group = contents.groups[name]
    stated = stated_rows(files, group_folder(name))
    if patterns:
        keys = [key for key in group.tensors if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]
        sizes = {group.tensors[key].shape[0] for key in keys if group.tensors[key].shape}
        if len(sizes) != 1:
            raise InvalidArgument(f"{name}: the tensors named {', '.join(patterns)} have {sorted(sizes)} rows")
        rows = sizes.pop()
    else:
        if stated is None:
            raise NotFound(f"{name}: no config.json states vocab_size; name the embeddings with --key")
        rows = stated
        keys = [key for key, found in group.tensors.items() if is_embedding(key) and found.shape[:1] == (rows,)]
        if not keys:
            raise NotFound(f"{name}: no embedding has {rows} rows, as config.json states; name them with --key")
        _refuse_others(name, group, rows, keys)
    _refuse_columns(name, group, rows)
    for key in keys:
        _check_tensor(name, key, contents)
    return StoredVocabulary(name, rows, tuple(keys))


def _refuse_others(name: str, group: Group, rows: int, keys: Sequence[str]) -> None:
    others = [key for key, recipe in group.tensors.items() if recipe.shape[:1] == (rows,) and key not in keys]
    if others:
        raise Unsupported(
            f"{name}: {others[0]} has {rows} rows, as many as the vocabulary, but not the name of an embedding; name "
            f"all tensors that have a row for each token with --key, such as --key {keys[0]}"
        )


def _refuse_columns(name: str, group: Group, rows: int) -> None:
    """Raise Unsupported for BART's final_logits_bias, [1, vocab_size], whose columns would have to follow."""
    found = [key for key, recipe in group.tensors.items() if recipe.shape == (1, rows) and rows > 1]
    if found:
        raise Unsupported(
            f"{name}: {found[0]} has {rows} columns, as many as the vocabulary has rows: Holdfast resizes rows only, "
            "and the model would not open"
        )


def _check_tensor(name: str, key: str, contents: Contents) -> None:
    recipe = contents.groups[name].tensors[key]
    if key in StoredSubclasses.of(contents, name).outer or recipe.dtype.name not in FLOATS:
        raise Unsupported(f"{name}: {key} is quantized ({recipe.dtype.name}): its rows cannot be resized")
    if len(recipe.shape) > 2:
        raise Unsupported(f"{name}: {key} has the shape {list(recipe.shape)}, which is no embedding")


def is_embedding(key: str) -> bool:
    """Return True for a key that usually names an embedding of tokens, a head, or a bias of one."""
    return _NAMES.fullmatch(key) is not None


def stated_rows(files: Mapping[str, bytes], folder: str) -> int | None:
    """Return the vocab_size of a model's config, or of the config of its text part; None if none states it."""
    fields = config_fields(files, folder)
    for scope in (fields, *(value for value in fields.values() if isinstance(value, dict))):
        if type(scope.get(FIELD)) is int:
            return int(scope[FIELD])
    return None


def config_fields(files: Mapping[str, bytes], folder: str, name: str = CONFIG) -> dict[str, Any]:
    """Return the fields of a config file, empty if there is none."""
    data = files.get(f"{folder}{name}")
    fields = strictjson.loads(data, f"{folder}{name}") if data is not None else {}
    return fields if isinstance(fields, dict) else {}


def with_rows_stated(data: bytes, before: int, rows: int) -> bytes:
    """Return a config that states another vocab_size wherever it stated this one; every other byte stays."""
    text = re.sub(
        rb'("vocab_size"\s*:\s*)' + json.dumps(before).encode() + rb"(?![0-9.eE])",
        lambda found: found[1] + str(rows).encode(),
        data,
    )
    strictjson.loads(text, CONFIG)
    return text
