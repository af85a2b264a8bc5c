"""Selection of the contents to convert by patterns, and `--dtype`: casts, masters as weights, quantized scales."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.core.names import ADAPTER, BASE, masters_group
from holdfast.format.dtypes import DType, dtype_named
from holdfast.plan.contents import Contents, Group, KeySelection
from holdfast.plan.quantized_keys import is_float8, quantized_weights
from holdfast.plan.subclass_keys import StoredSubclasses, entry_name

_NEAR_KEYS = 20_000  # searching more keys takes too long for a hint
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def is_model(name: str, group: Group) -> bool:
    """Return True if a group contains a model's weights, to which `--dtype` applies."""
    return group.kind in ("module", ADAPTER, BASE) or name == "model"


def select_contents(
    contents: Contents, only: Sequence[str], remove: Sequence[str], unmapped: Contents | None = None
) -> Contents:
    """Return the contents that match patterns. An optimizer keeps the state of the selected parameters.

    `unmapped` are the contents before a mapping renamed keys.
    Raises InvalidArgument for a pattern without a match, NotFound if no tensor is left.
    """
    if not only and not remove:
        return contents
    choice = KeySelection(tuple(only), tuple(remove))
    groups = {}
    for name, group in contents.groups.items():
        kept = _select_group(name, group, choice)
        if kept.tensors or not group.tensors:
            groups[name] = kept
    described = {entry_name(name) for name in groups}
    state = {
        name: _select_entry(name, entry, choice)
        for name, entry in contents.state.items()
        if choice.selects_entry(name) or name in groups or name in described
    }
    unmatched = [pattern for pattern in (*only, *remove) if pattern not in choice.used]
    if unmatched:
        raise InvalidArgument(_unmatched(unmatched[0], contents, unmapped))
    if not any(group.tensors for group in groups.values()):
        raise NotFound("no tensor of the source is left: the patterns exclude all of them")
    return replace(contents, groups=groups, state=state)


def _unmatched(pattern: str, contents: Contents, unmapped: Contents | None) -> str:
    """Explain why a pattern has no match. After a mapping, patterns apply to the target's keys."""
    keys = [key for group in contents.groups.values() for key in group.tensors]
    near = difflib.get_close_matches(pattern, keys[:_NEAR_KEYS], n=3)
    hint = f"; keys are, for example, {', '.join(near or keys[:3])}"
    if unmapped is None or unmapped is contents:
        return f"no key, group or entry of the source matches the pattern {pattern!r}{hint}"
    choice = KeySelection((pattern,))
    before = any(choice.selects(name, key) for name, group in unmapped.groups.items() for key in group.tensors)
    reason = (
        "it matches keys of the source, which the mapping renames" if before else "patterns apply after the mapping"
    )
    return f"no key, group or entry matches the pattern {pattern!r} after the mapping: {reason}{hint}"


def _select_group(name: str, group: Group, choice: KeySelection) -> Group:
    aliases_of: dict[str, list[str]] = {}
    for alias, key in group.aliases.items():
        aliases_of.setdefault(key, []).append(alias)
    tensors = {}
    for key, recipe in group.tensors.items():
        others = list(aliases_of.get(key, ()))
        if group.kind == "optimizer":  # the state of a parameter is selected with the parameter
            others.append(key.rpartition("/")[0])
        if choice.selects(name, key, *others):
            tensors[key] = recipe
    return Group(
        group.kind,
        tensors,
        {alias: key for alias, key in group.aliases.items() if key in tensors},
        {key: dtype for key, dtype in group.logical.items() if key in tensors},
    )


def _select_entry(name: str, entry: Any, choice: KeySelection) -> Any:
    if entry.get("kind") != "optimizer":
        return entry

    def is_selected(key: str) -> bool:
        # A pattern that selects state of a parameter selects the parameter.
        return not choice.only or choice.selects(name, key)

    def is_removed(key: str) -> bool:
        return bool(choice.ignore) and not KeySelection((), choice.ignore).selects(name, key)

    params = (key for group in entry["groups"] for key in group["params"])
    kept = {key for key in params if is_selected(key) and not is_removed(key)}
    return entry | {
        "groups": [group | {"params": [key for key in group["params"] if key in kept]} for group in entry["groups"]],
        "stateless": [key for key in entry.get("stateless", []) if key in kept],
        "scalars": {key: value for key, value in entry.get("scalars", {}).items() if key in kept},
    }


def model_dtype(name: str) -> DType:
    """Return the dtype to cast models to. Raises InvalidArgument if models cannot be cast to it."""
    if name not in _FLOATS:
        raise InvalidArgument(f"--dtype {name}: a model can be cast to {', '.join(_FLOATS)}")
    return dtype_named(name)


def cast_models(contents: Contents, dtype: DType, known: Mapping[str, Group]) -> Contents:
    """Cast the floating-point tensors of models. Masters and optimizer state keep their dtype.

    If masters among the `known` groups have the requested dtype, they replace the weights, as on load. Raises
    Unsupported for quantized weights, which cannot be cast without their scales.
    """
    for name, group in contents.groups.items():
        if is_model(name, group):
            _refuse_quantized(name, group, dtype)
            _refuse_subclasses(name, contents, dtype)
    groups: Mapping[str, Group] = {
        name: _cast_group(with_masters(name, group, dtype, known), dtype) if is_model(name, group) else group
        for name, group in contents.groups.items()
    }
    return replace(contents, groups=groups)


def _refuse_quantized(name: str, group: Group, dtype: DType) -> None:
    dtypes = {key: recipe.dtype.name for key, recipe in group.tensors.items()}
    quantized = next(iter(quantized_weights(dtypes).values()), None)
    narrow = next((key for key, known in dtypes.items() if is_float8(known)), None)
    if quantized is None and narrow is None:
        return
    problem = quantized.what if quantized is not None else f"{narrow!r} is {dtypes[narrow or '']}"
    raise Unsupported(
        f"--dtype {dtype.name}: {name}: {problem}; a cast without applying scales would change the weights; omit "
        "--dtype, or use --dequantize instead"
    )


def _refuse_subclasses(name: str, contents: Contents, dtype: DType) -> None:
    key = next(iter(StoredSubclasses.of(contents, name).descriptions), None)
    if key is not None:
        raise Unsupported(
            f"--dtype {dtype.name}: {name}: {key} was saved from a tensor subclass; a cast of the tensors inside would "
            "change it; omit --dtype"
        )


def check_scales_kept(before: Contents, after: Contents) -> None:
    """Raise Unsupported if patterns exclude the scales of a quantized weight but not the weight."""
    for name, group in after.groups.items():
        if not is_model(name, group) or name not in before.groups:
            continue
        dtypes = {key: recipe.dtype.name for key, recipe in before.groups[name].tensors.items()}
        for key, weight in quantized_weights(dtypes).items():
            lost = [other for other in weight.companions if other not in group.tensors] if key in group.tensors else []
            if lost:
                raise Unsupported(f"{name}: {weight.what}; the patterns exclude {lost[0]!r} but keep the weight")


def with_masters(name: str, group: Group, dtype: DType, known: Mapping[str, Group]) -> Group:
    """Replace weights of a model by their masters, where only the masters have the dtype."""
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
