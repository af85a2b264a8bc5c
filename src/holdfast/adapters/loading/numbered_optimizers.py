"""Optimizers that other tools stored by parameter number: assign the keys of the live optimizer's parameters.

torch numbers parameters in the order of the param_groups, which only the live optimizer knows. If that
order cannot match the stored one, the optimizer is not loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.adapters.live_state import LiveState
from holdfast.adapters.optimizer import group_options, is_master, key_of_param, shaped_like_parameter
from holdfast.core.names import masters_group
from holdfast.plan.contents import Contents, Group

_BY_KEY = "or save it by key: create it with model.named_parameters(), or save the result of get_state_dict"
_NOTE = "its parameters are stored by number; matched in the order of the live optimizer's param_groups, as torch does"


@dataclass(frozen=True, slots=True)
class KeyedContents:
    """Contents in which numbered optimizers have keys; `problems` says why the others were left out."""

    contents: Contents
    notes: tuple[str, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LiveParameters:
    """The keys and shapes of the live parameters, group by group."""

    module: str
    groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]]

    @property
    def sizes(self) -> list[int]:
        return [len(group) for group in self.groups]

    def by_number(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        flat = [param for group in self.groups for param in group]
        return {str(number): param for number, param in enumerate(flat)}


def key_numbered_optimizers(contents: Contents, live: LiveState) -> KeyedContents:
    """Assign the live parameter keys to the states of every optimizer that is stored by number."""
    notes: list[str] = []
    problems: dict[str, str] = {}
    for name, optimizer in live.optimizers.items():
        entry = contents.state.get(name)
        if not entry or not entry.get("numbered") or name not in contents.groups:
            continue
        params = _live_parameters(name, optimizer, live)
        problem = _problem(contents, name, params)
        if problem:
            problems[name] = f"{name}: its parameters are stored by number, not by key: {problem}"
            contents = _without(contents, name)
        else:
            contents = _with_keys(contents, name, params)
            notes.append(f"{name}: {_NOTE}")
    return KeyedContents(contents, tuple(notes), problems)


def _live_parameters(name: str, optimizer: Any, live: LiveState) -> _LiveParameters:
    module, key_of = live.parameter_keys(optimizer)
    groups = [
        [(key_of_param(name, param, key_of), tuple(param.shape)) for param in params]
        for params, _ in group_options(optimizer)
    ]
    return _LiveParameters(module, groups)


def _problem(contents: Contents, name: str, params: _LiveParameters) -> str:
    """Return why the stored numbers cannot match the live optimizer; "" if they can."""
    entry = contents.state[name]
    if entry.get("mapped"):
        return f"a mapping does not preserve parameter numbers; exclude it with ignore, {_BY_KEY}"
    sizes = [len(group["params"]) for group in entry["groups"]]
    if sizes != params.sizes:
        return (
            f"its groups have {sizes or 'no'} parameters, those of the live optimizer {params.sizes}; "
            f"create the optimizer with the param_groups it was saved with, {_BY_KEY}"
        )
    by_number = params.by_number()
    if len({key for key, _ in by_number.values()}) != len(by_number):
        return f"several live parameters share a key; {_BY_KEY.removeprefix('or ')}"
    for label in contents.groups[name].tensors:
        number, _, state_name = label.rpartition("/")
        source = contents.find(name, label)
        if number not in by_number or source is None or not shaped_like_parameter(state_name):
            continue
        key, shape = by_number[number]
        if source.logical_shape != shape and math.prod(source.logical_shape) > 1:
            return (
                f"{label} has shape {list(source.logical_shape)}, but parameter {number} of the live optimizer, {key}, "
                f"has shape {list(shape)}; create the optimizer with its parameters in the saved order, {_BY_KEY}"
            )
    return ""


def _without(contents: Contents, name: str) -> Contents:
    groups = {own: group for own, group in contents.groups.items() if own != name}
    return replace(contents, groups=groups, state={own: e for own, e in contents.state.items() if own != name})


def _with_keys(contents: Contents, name: str, params: _LiveParameters) -> Contents:
    keys = {number: key for number, (key, _) in params.by_number().items()}
    group, entry = contents.groups[name], contents.state[name]
    masters_name = masters_group(params.module)
    masters = dict(contents.groups[masters_name].tensors) if masters_name in contents.groups else {}
    tensors, logical = {}, {}
    for label, recipe in group.tensors.items():
        number, _, state_name = label.rpartition("/")
        if is_master(state_name) and number in keys:
            masters.setdefault(keys[number], recipe)
            continue
        new_label = f"{keys.get(number, number)}/{state_name}"
        tensors[new_label] = recipe
        if label in group.logical:
            logical[new_label] = group.logical[label]
    groups = {**contents.groups, name: Group(group.kind, tensors, {}, logical)}
    if masters:
        groups[masters_name] = Group("masters", masters)
    return replace(contents, groups=groups, state={**contents.state, name: _entry_with_keys(entry, keys)})


def _entry_with_keys(entry: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    def key_of(number: str) -> str:
        return keys.get(number, number)

    groups = [{**group, "params": [key_of(number) for number in group["params"]]} for group in entry["groups"]]
    return {
        **{field_name: value for field_name, value in entry.items() if field_name != "numbered"},
        "groups": groups,
        "stateless": sorted(key_of(number) for number in entry.get("stateless", ())),
        "scalars": {key_of(number): values for number, values in entry.get("scalars", {}).items()},
    }
