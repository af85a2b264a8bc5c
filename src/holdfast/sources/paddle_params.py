"""`.pdparams` and `.pdopt`: what `paddle.save` writes of a model's and an optimizer's state dict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.core.filenames import is_plain
from holdfast.format.names import natural_key
from holdfast.plan.contents import Contents
from holdfast.plan.recipe import Recipe
from holdfast.sources.foreign import Folder, Found
from holdfast.sources.laying import lay_files
from holdfast.sources.paddle_pickles import TABLE, Arrays
from holdfast.sources.paddle_static import MASTERS, OPTIMIZER, Sorted

FORMAT = "paddle state dicts"
_FILE = re.compile(r"(?P<stem>[^/]+?)(?:[.-](?P<ranks>[0-9a-z_-]+))?\.(?P<kind>pdparams|pdopt|pdema)")
_RANKS = re.compile(r"(?:tp|mp)[0-9]+")
_NOT_MODELS = ("scheduler", "scaler", "training_args", "rng_state")
_MODELS = frozenset({"model", "model_state", "model_state_dict", "state_dict", "params", "net"})
_OPTIMIZERS = frozenset({"optimizer", "optimizer_state", "optimizer_state_dict", "opt", "optim", "opt_state_dict"})


def read_params(folder: Folder) -> Found | None:
    """The contents of a folder of state dicts, or of one file of them; None if there is none."""
    names = _chosen(folder)
    if not names:
        return None
    arrays, found = Arrays(folder), Sorted()
    for name in sorted(names, key=lambda name: (_rank(name), natural_key(name))):
        match = _FILE.fullmatch(name)
        if match and _RANKS.search(match["ranks"] or ""):
            raise Unsupported(
                f"{folder.path}/{name}: a part of a tensor-parallel rank; how the parts join is known to the model's "
                "code alone: merge them in Paddle first"
            )
        _sort(found, arrays.read(name), name, f"{folder.path}/{name}")
    groups = found.groups()
    return Found(FORMAT, Contents(groups, lay_files(groups.values(), folder.path), found.state), arrays.made)


def _chosen(folder: Folder) -> list[str]:
    """The files that make up one model: by the names PaddleFormers gives, or the only ones there are."""
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
            f"{folder.path}: several models, of the files {', '.join(sorted(stems)[:10])}.pdparams; name one of them"
        )
    return list(matches)


def _rank(name: str) -> int:
    """Models first: they say what their parameters are called."""
    return name.endswith(".pdopt") + name.startswith(MASTERS)


def _sort(found: Sorted, value: Mapping[str, Any], name: str, where: str) -> None:
    """Sort a file's state dict into groups by the file's name, or by the names of the dicts in it."""
    if name.startswith(MASTERS):
        found.add_masters(value, where)
        return
    if name.endswith(".pdopt"):
        found.add_optimizer(value, where)
        return
    nested = {key: item for key, item in value.items() if key != TABLE and _has_tensors(item)}
    if not nested:
        found.add_model(value, where)
        return
    for key, item in sorted(nested.items(), key=lambda entry: entry[0] not in _MODELS):
        if key in _MODELS:
            found.add_model(item, where)
        elif key in _OPTIMIZERS:
            found.add_optimizer(item, where)
        elif key == MASTERS:
            found.add_masters(item, where)
        else:
            found.add_tensors(key if is_plain(key) else "tensors", item, where)
    found.add_tensors("tensors", value, where)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(item, Recipe) for item in value.values())
