"""Read `.pdparams` and `.pdopt` of `paddle.save`: find one model's files, sort their state dicts into groups."""

from __future__ import annotations

import re
from typing import Any

from holdfast.core.errors import Damaged, Unsupported
from holdfast.core.names import check_group, natural_key
from holdfast.plan.contents import Contents
from holdfast.sources.foreign import Folder, ReaderResult
from holdfast.sources.paddle.pdparams_nested import has_tensor, is_state_dict
from holdfast.sources.paddle.pdparams_pickle import TABLE, Arrays
from holdfast.sources.paddle.static_names import MASTERS, OPTIMIZER, PaddleGroups
from holdfast.sources.trees.stored_blocks import stored_files

FORMAT = "paddle state dicts"
_FILE = re.compile(r"(?P<stem>[^/]+?)(?:[.-](?P<ranks>[0-9a-z_-]+))?\.(?P<kind>pdparams|pdopt|pdema)")
_RANKS = re.compile(r"(?:tp|mp)[0-9]+")
_NOT_MODELS = ("scheduler", "scaler", "training_args", "rng_state")
_MODELS = frozenset({"model", "model_state", "model_state_dict", "state_dict", "params", "net"})
_OPTIMIZERS = frozenset({"optimizer", "optimizer_state", "optimizer_state_dict", "opt", "optim", "opt_state_dict"})


def read_params(folder: Folder) -> ReaderResult | None:
    """Return the contents of a folder or file of state dicts; None if there is none."""
    names = _model_files(folder)
    if not names:
        return None
    arrays, collected = Arrays(folder), PaddleGroups()
    for name in sorted(names, key=lambda name: (_rank(name), natural_key(name))):
        match = _FILE.fullmatch(name)
        if match and _RANKS.search(match["ranks"] or ""):
            raise Unsupported(
                f"{folder.path}/{name}: the shard of a tensor-parallel rank; only the model's code can merge shards: "
                "merge them in Paddle first"
            )
        _sort(collected, arrays.read_tree(name), name, f"{folder.path}/{name}")
    groups = collected.groups()
    if not groups:
        raise Unsupported(f"{folder.path}/{names[0]}: contains no tensors")
    contents = Contents(groups, stored_files(groups.values(), folder.path), collected.state)
    return ReaderResult(
        FORMAT, contents, arrays.made, tuple(collected.notes), read=frozenset(names), linear_weights="in-out"
    )


def _model_files(folder: Folder) -> list[str]:
    """Return the files that make up one model: by PaddleFormers' names, or the only ones that exist."""
    matches = {name: match for name in folder.files if (match := _FILE.fullmatch(name))}
    if folder.only is not None:
        return list(matches)
    matches = {name: match for name, match in matches.items() if match["stem"] not in _NOT_MODELS}
    stems = {match["stem"] for match in matches.values() if match["kind"] == "pdparams"}
    if "model_state" in stems:
        stems &= {"model_state", MASTERS}
        return [name for name, match in matches.items() if match["stem"] in {*stems, OPTIMIZER}]
    if len(stems) > 1:
        raise Unsupported(
            f"{folder.path}: several models in the files {', '.join(sorted(stems)[:10])}.pdparams; open one of them"
        )
    return list(matches)


def _rank(name: str) -> int:
    """Sort models first, because they give the names of their parameters."""
    return name.endswith(".pdopt") + name.startswith(MASTERS)


def _sort(collected: PaddleGroups, value: Any, name: str, where: str) -> None:
    """Sort a file's value into groups by the file's name, or by the names of its dicts."""
    if not has_tensor(value) and not isinstance(value, dict):
        raise Damaged(f"{where}: a {type(value).__name__}, expected a dict of tensors")
    if name.startswith(MASTERS):
        collected.add_masters(value, where)
    elif name.endswith(".pdopt"):
        collected.add_optimizer(value, where)
    elif name.endswith(".pdema"):
        collected.add_tensors("ema", value, where)
    elif isinstance(value, dict) and any(_is_part(key, item) for key, item in value.items() if key != TABLE):
        _sort_parts(collected, value, where)
    else:
        collected.add_model(value, where)


def _is_part(key: str, item: Any) -> bool:
    """Return True if an item of a file's dict is a separate state dict: a model, an optimizer, another model."""
    named = key in _MODELS or key in _OPTIMIZERS or key == MASTERS
    return is_state_dict(item) or (named and isinstance(item, dict) and has_tensor(item))


def _sort_parts(collected: PaddleGroups, value: dict[str, Any], where: str) -> None:
    """Sort a dict of state dicts. Single tensors form a group; plain values stay values."""
    known = any(key in _MODELS or key in _OPTIMIZERS or key == MASTERS for key in value if has_tensor(value[key]))
    lone = {key: item for key, item in value.items() if key != TABLE and not isinstance(item, dict)}
    if has_tensor(lone) and not known:  # a model with partly nested keys
        collected.add_model(value, where)
        return
    for key, item in sorted(value.items(), key=lambda entry: entry[0] not in _MODELS):
        if not has_tensor(item):
            collected.add_values({key: item} if key != TABLE else {}, where)
        elif key in _MODELS:
            collected.add_model(item, where)
        elif key in _OPTIMIZERS:
            collected.add_optimizer(item, where)
        elif key == MASTERS:
            collected.add_masters(item, where)
        elif isinstance(item, dict) and _names_group(key):
            collected.add_tensors(key, item, where)
        else:
            collected.add_tensors("tensors", {key: item}, where)


def _names_group(name: str) -> bool:
    try:
        check_group(name)
    except Unsupported:
        return False
    return "/" not in name
