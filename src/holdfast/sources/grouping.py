"""What in a tree of foreign values is the model, what an optimizer, and what is neither."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.format.names import check_group
from holdfast.plan.contents import Contents, Group
from holdfast.sources.foreign import Found
from holdfast.sources.laying import lay_files
from holdfast.sources.leaves import Leaf, group_of, has_leaf, keyed, state_entry
from holdfast.sources.optimizers import MASTERS, OptimizerState, keys_of, optimizer_entry, optimizer_in

_MODELS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state")
_FLAT_OPTIMIZER = re.compile(r"(?:chained_[0-9]+\.)?(?:optimizer|optim)\.((?:state|param_groups)\..+)")
_STEPS = ("step", "global_step", "iteration")
_OTHERS = "tensors"


@dataclass(slots=True)
class _Sorted:
    """The parts of a tree, by what they are."""

    model: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, OptimizerState] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


def found_in(format_name: str, tree: Any, where: str, made: Mapping[str, bytes] | None = None) -> Found:
    """What a reader found: a tree of values and tensors, sorted into groups."""
    parts = _sort(_unwrapped(tree))
    groups: dict[str, Group] = {}
    state: dict[str, Any] = {}
    notes: list[str] = []
    model = keyed(parts.model, "model", where)
    if model:
        groups["model"] = group_of("module", model, tie=True)
    for name, optimizer in parts.optimizers.items():
        _put_optimizer(name, optimizer, model, groups, state, notes, where)
    for name, value in parts.others.items():
        _put_other(name, value, groups, state, notes, where)
    if not groups:
        raise Unsupported(f"{where}: there is no tensor in it")
    contents = Contents(groups, lay_files(groups.values(), where), state, _step(parts.others))
    return Found(format_name, contents, made or {}, tuple(notes))


def _unwrapped(tree: Any) -> dict[str, Any]:
    """The tree below names that only wrap it, such as "app"."""
    if not isinstance(tree, dict):
        return {_OTHERS: tree} if not isinstance(tree, Leaf) else {"value": tree}
    for _ in range(4):
        inner = next(iter(tree.values())) if len(tree) == 1 else None
        known = isinstance(inner, dict) and any(name in inner for name in (*_MODELS, *_OPTIMIZERS))
        if not known or next(iter(tree)) in (*_MODELS, *_OPTIMIZERS):
            break
        tree = inner
    return {str(name): value for name, value in tree.items()}


def _sort(tree: Mapping[str, Any]) -> _Sorted:
    parts, flat, lone = _Sorted(), {}, {}
    named = next((name for name in _MODELS if isinstance(tree.get(name), dict) and has_leaf(tree[name])), None)
    for name, value in tree.items():
        flat_optimizer = _FLAT_OPTIMIZER.fullmatch(name)
        optimizer = optimizer_in(value) if name in _OPTIMIZERS else None
        if flat_optimizer is not None:
            flat[flat_optimizer[1]] = value
        elif name == named:
            parts.model = value
        elif optimizer is not None:
            parts.optimizers["optimizer" if "optimizer" not in tree else name] = optimizer
        elif isinstance(value, Leaf):
            lone[name] = value
        else:
            parts.others[name] = value
    if flat:
        optimizer = optimizer_in(flat)
        if optimizer is None or "optimizer" in parts.optimizers:
            parts.others["optimizer"] = flat
        else:
            parts.optimizers["optimizer"] = optimizer
    if named is None:
        parts.model = _without_prefix(lone, parts.optimizers)
    else:
        parts.others |= lone
    return parts


def _without_prefix(tensors: dict[str, Any], optimizers: Mapping[str, OptimizerState]) -> dict[str, Any]:
    """Flat keys without "model.", where an optimizer has the same keys without it."""
    bare = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    params = {param for optimizer in optimizers.values() for param in optimizer.params}
    return bare if len(bare) == len(tensors) and params and params <= set(bare) else tensors


def _put_optimizer(
    name: str,
    found: OptimizerState,
    model: Mapping[str, Leaf],
    groups: dict[str, Group],
    state: dict[str, Any],
    notes: list[str],
    where: str,
) -> None:
    aliases = groups["model"].aliases if "model" in groups else {}
    keys = keys_of(found, model, aliases)
    if keys is None:
        numbered = {f"state.{param}.{n}": v for param, states in found.state.items() for n, v in states.items()}
        groups[name] = group_of("tensors", keyed(numbered, name, where))
        notes.append(
            f"{where}: {name} numbers its parameters, and which is which is not certain: its tensors are "
            "listed by number; save with named_parameters() to have them by key"
        )
        return
    tensors: dict[str, Leaf] = {}
    masters: dict[str, Leaf] = {}
    for param, states in found.state.items():
        for state_name, value in states.items():
            if isinstance(value, Leaf) and state_name in MASTERS:
                masters[keys[param]] = value
            elif isinstance(value, Leaf):
                tensors[f"{keys[param]}/{state_name}"] = value
    groups[name] = group_of("optimizer", keyed(tensors, name, where))
    if masters:
        groups["master_weights"] = group_of("masters", keyed(masters, "master_weights", where))
    state[name] = optimizer_entry(found, keys, name)


def _put_other(
    name: str, value: Any, groups: dict[str, Group], state: dict[str, Any], notes: list[str], where: str
) -> None:
    tensors = keyed(value, name, where)
    if tensors:
        groups[_free(_group_name(name), groups)] = group_of("tensors", tensors)
    try:
        state[name] = state_entry(value, name)
    except Unsupported as error:
        notes.append(f"{where}: left out: {error}")


def _group_name(name: str) -> str:
    try:
        check_group(name)
    except Unsupported:
        return _OTHERS
    return name


def _free(name: str, groups: Mapping[str, Group]) -> str:
    """The name, or one like it if a group has it already."""
    return next(text for text in (name, *(f"{name}-{n}" for n in range(2, len(groups) + 3))) if text not in groups)


def _step(values: Mapping[str, Any]) -> int | None:
    found = [values[name] for name in _STEPS if type(values.get(name)) is int and 0 <= values[name] < 2**53]
    return found[0] if found else None
