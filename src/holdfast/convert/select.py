"""What of a checkpoint is converted, and as what dtype. Pure: contents in, contents out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.format.dtypes import DType, dtype_named
from holdfast.format.names import masters_group
from holdfast.plan.contents import Contents, Group
from holdfast.plan.key_patterns import KeySelection
from holdfast.plan.quantized import is_float8, quantized_weights

_NEAR_KEYS = 20_000  # to look at more takes longer than a hint is worth
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def is_model(name: str, group: Group) -> bool:
    """Whether a group is a model's weights: what a change of dtype is about."""
    return group.kind == "module" or name == "model"


def chosen(
    contents: Contents, only: Sequence[str], remove: Sequence[str], unmapped: Contents | None = None
) -> Contents:
    """The contents that patterns take: of an optimizer, what belongs to the parameters that stay.

    `unmapped` is what they were before a mapping renamed keys.
    Raises InvalidArgument for a pattern that fits nothing, NotFound if nothing is left.
    """
    if not only and not remove:
        return contents
    choice = KeySelection(tuple(only), tuple(remove))
    groups = {}
    for name, group in contents.groups.items():
        kept = _chosen_group(name, group, choice)
        if kept.tensors or not group.tensors:
            groups[name] = kept
    state = {
        name: _chosen_entry(name, entry, choice)
        for name, entry in contents.state.items()
        if choice.selects_entry(name) or name in groups
    }
    unused = [pattern for pattern in (*only, *remove) if pattern not in choice.used]
    if unused:
        raise InvalidArgument(_unused(unused[0], contents, unmapped))
    if not any(group.tensors for group in groups.values()):
        raise NotFound("nothing is left of the source: the patterns leave out every tensor")
    return replace(contents, groups=groups, state=state)


def _unused(pattern: str, contents: Contents, unmapped: Contents | None) -> str:
    """Why a pattern fits nothing: after a mapping the keys are those of the target."""
    keys = [key for group in contents.groups.values() for key in group.tensors]
    near = difflib.get_close_matches(pattern, keys[:_NEAR_KEYS], n=3)
    hint = f"; there are {', '.join(near or keys[:3])}"
    if unmapped is None or unmapped is contents:
        return f"no key, group or entry of the source fits the pattern {pattern!r}{hint}"
    choice = KeySelection((pattern,))
    before = any(choice.selects(name, key) for name, group in unmapped.groups.items() for key in group.tensors)
    what = "it fits keys of the source, which the mapping has renamed" if before else "the mapping comes first"
    return f"no key, group or entry fits the pattern {pattern!r} after the mapping: {what}{hint}"


def _chosen_group(name: str, group: Group, choice: KeySelection) -> Group:
    aliases_of: dict[str, list[str]] = {}
    for alias, key in group.aliases.items():
        aliases_of.setdefault(key, []).append(alias)
    tensors = {}
    for key, recipe in group.tensors.items():
        others = list(aliases_of.get(key, ()))
        if group.kind == "optimizer":  # a parameter's state goes with the parameter
            others.append(key.rpartition("/")[0])
        if choice.selects(name, key, *others):
            tensors[key] = recipe
    return Group(
        group.kind,
        tensors,
        {alias: key for alias, key in group.aliases.items() if key in tensors},
        {key: dtype for key, dtype in group.logical.items() if key in tensors},
    )


def _chosen_entry(name: str, entry: Any, choice: KeySelection) -> Any:
    if entry.get("kind") != "optimizer":
        return entry

    def stays(key: str) -> bool:
        # What a pattern takes of a parameter's state stands for the parameter.
        return not choice.only or choice.selects(name, key)

    def gone(key: str) -> bool:
        return bool(choice.ignore) and not KeySelection((), choice.ignore).selects(name, key)

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


def cast_models(contents: Contents, dtype: DType, known: Mapping[str, Group]) -> Contents:
    """Models with their floating tensors cast; masters and optimizer state stay as wide as they are.

    Where masters among the groups that are `known` have the dtype that is asked for, they are the weights, as
    on load. Raises Unsupported for quantized weights: without their scales they are not the weights.
    """
    for name, group in contents.groups.items():
        if is_model(name, group):
            _refuse_quantized(name, group, dtype)
    groups: Mapping[str, Group] = {
        name: _cast_group(with_masters(name, group, dtype, known), dtype) if is_model(name, group) else group
        for name, group in contents.groups.items()
    }
    return replace(contents, groups=groups)


def _refuse_quantized(name: str, group: Group, dtype: DType) -> None:
    dtypes = {key: recipe.dtype.name for key, recipe in group.tensors.items()}
    found = next(iter(quantized_weights(dtypes).values()), None)
    narrow = next((key for key, known in dtypes.items() if is_float8(known)), None)
    if found is None and narrow is None:
        return
    what = found.what if found is not None else f"{narrow!r} is {dtypes[narrow or '']}"
    raise Unsupported(
        f"--dtype {dtype.name}: {name}: {what}; a cast without applying scales would change the weights. Leave --dtype "
        "out, or take weights that are not quantized (from_pretrained with dequantize, or the tool that quantized them)"
    )


def check_scales_stay(before: Contents, after: Contents) -> None:
    """Raise Unsupported where patterns leave out the scales of a quantized weight that stays."""
    for name, group in after.groups.items():
        if not is_model(name, group) or name not in before.groups:
            continue
        dtypes = {key: recipe.dtype.name for key, recipe in before.groups[name].tensors.items()}
        for key, weight in quantized_weights(dtypes).items():
            lost = [other for other in weight.companions if other not in group.tensors] if key in group.tensors else []
            if lost:
                raise Unsupported(f"{name}: {weight.what}; the patterns leave out {lost[0]!r} and keep the weight")


def with_masters(name: str, group: Group, dtype: DType, known: Mapping[str, Group]) -> Group:
    """A model with its masters in the place of weights, where only they have the dtype."""
    masters = known.get(masters_group(name))
    if masters is None:
        return group
    better = {
        key: master
        for key, master in masters.tensors.items()
        if key in group.tensors
        and master.dtype == dtype != group.tensors[key].dtype
        and master.shape == group.tensors[key].shape
    }
    return replace(group, tensors={**group.tensors, **better})


def _cast_group(group: Group, dtype: DType) -> Group:
    tensors = {
        key: recipe.cast(dtype) if recipe.dtype.name in _FLOATS and key not in group.logical else recipe
        for key, recipe in group.tensors.items()
    }
    return replace(group, tensors=tensors)
