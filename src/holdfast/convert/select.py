"""What of a checkpoint is converted, and as what dtype. Pure: contents in, contents out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.format.dtypes import DType, dtype_named
from holdfast.plan.choice import Choice
from holdfast.plan.contents import Contents, Group

_FLOATS = ("float64", "float32", "float16", "bfloat16")


def is_model(name: str, group: Group) -> bool:
    """Whether a group is a model's weights: what a change of dtype is about."""
    return group.kind == "module" or name == "model"


def chosen(contents: Contents, only: Sequence[str], remove: Sequence[str]) -> Contents:
    """The contents that patterns take: of an optimizer, what belongs to the parameters that stay.

    Raises InvalidArgument for a pattern that fits nothing, NotFound if nothing is left.
    """
    if not only and not remove:
        return contents
    choice = Choice(tuple(only), tuple(remove))
    groups = {}
    for name, group in contents.groups.items():
        kept = _chosen_group(name, group, choice)
        if kept.tensors or not group.tensors:
            groups[name] = kept
    state = {
        name: _chosen_entry(name, entry, choice)
        for name, entry in contents.state.items()
        if choice.takes_entry(name) or name in groups
    }
    unused = [pattern for pattern in (*only, *remove) if pattern not in choice.used]
    if unused:
        raise InvalidArgument(f"no key, group or entry of the source fits the pattern {unused[0]!r}")
    if not any(group.tensors for group in groups.values()):
        raise NotFound("nothing is left of the source: the patterns leave out every tensor")
    return replace(contents, groups=groups, state=state)


def _chosen_group(name: str, group: Group, choice: Choice) -> Group:
    aliases_of: dict[str, list[str]] = {}
    for alias, key in group.aliases.items():
        aliases_of.setdefault(key, []).append(alias)
    tensors = {}
    for key, recipe in group.tensors.items():
        others = list(aliases_of.get(key, ()))
        if group.kind == "optimizer":  # a parameter's state goes with the parameter
            others.append(key.rpartition("/")[0])
        if choice.takes(name, key, *others):
            tensors[key] = recipe
    return Group(
        group.kind,
        tensors,
        {alias: key for alias, key in group.aliases.items() if key in tensors},
        {key: dtype for key, dtype in group.logical.items() if key in tensors},
    )


def _chosen_entry(name: str, entry: Any, choice: Choice) -> Any:
    if entry.get("kind") != "optimizer":
        return entry

    def stays(key: str) -> bool:
        # What a pattern takes of a parameter's state stands for the parameter.
        return not choice.only or choice.takes(name, key)

    def gone(key: str) -> bool:
        return bool(choice.ignore) and not Choice((), choice.ignore).takes(name, key)

    kept = {key for group in entry["groups"] for key in group["params"] if stays(key) and not gone(key)}
    return entry | {
        "groups": [group | {"params": [key for key in group["params"] if key in kept]} for group in entry["groups"]],
        "stateless": [key for key in entry.get("stateless", []) if key in kept],
        "scalars": {key: value for key, value in entry.get("scalars", {}).items() if key in kept},
    }


def model_dtype(name: str) -> DType:
    """The dtype to which models may be cast; raises InvalidArgument for others."""
    if name not in _FLOATS:
        raise InvalidArgument(f"--dtype {name}: a model can be cast to {', '.join(_FLOATS)}")
    return dtype_named(name)


def cast_models(contents: Contents, dtype: DType) -> Contents:
    """Models with their floating tensors cast; masters and optimizer state stay as wide as they are.

    8-bit floats stay too: without their scales they are not the weights.
    """
    groups: Mapping[str, Group] = {
        name: _cast_group(group, dtype) if is_model(name, group) else group for name, group in contents.groups.items()
    }
    return replace(contents, groups=groups)


def _cast_group(group: Group, dtype: DType) -> Group:
    tensors = {
        key: recipe.cast(dtype) if recipe.dtype.name in _FLOATS and key not in group.logical else recipe
        for key, recipe in group.tensors.items()
    }
    return replace(group, tensors=tensors)
