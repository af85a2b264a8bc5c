"""Optimizers that other tools stored by number: their states get the keys of the live optimizer's parameters.

torch numbers parameters in the order of the param_groups, and so does this: only the live optimizer
knows that order. Where it cannot be the same, nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.adapters.live_state import LiveState
from holdfast.adapters.optimizer import group_options, is_master, key_of_param, shaped_like_parameter
from holdfast.format.names import masters_group
from holdfast.plan.contents import Contents, Group

_BY_KEY = "or save it by key: make it with model.named_parameters(), or save what get_state_dict gives"
_NOTE = "its parameters are stored by number: taken in the order of the live optimizer's param_groups, as torch does"


@dataclass(frozen=True, slots=True)
class Named:
    """Contents in which numbered optimizers have keys; why those that could not be named are left out."""

    contents: Contents
    notes: tuple[str, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The live parameters, group by group, as keys and shapes."""

    module: str
    groups: Sequence[Sequence[tuple[str, tuple[int, ...]]]]

    @property
    def sizes(self) -> list[int]:
        return [len(group) for group in self.groups]

    def by_number(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        flat = [param for group in self.groups for param in group]
        return {str(number): param for number, param in enumerate(flat)}


def name_numbered(contents: Contents, live: LiveState) -> Named:
    """Give the states of every optimizer that is stored by number the keys of the live one."""
    notes: list[str] = []
    problems: dict[str, str] = {}
    for name, optimizer in live.optimizers.items():
        entry = contents.state.get(name)
        if not entry or not entry.get("numbered") or name not in contents.groups:
            continue
        numbers = _numbers(name, optimizer, live)
        problem = _problem(contents, name, numbers)
        if problem:
            problems[name] = f"{name}: its parameters are stored by number, not by key: {problem}"
            contents = _without(contents, name)
        else:
            contents = _named(contents, name, numbers)
            notes.append(f"{name}: {_NOTE}")
    return Named(contents, tuple(notes), problems)


def _numbers(name: str, optimizer: Any, live: LiveState) -> _Numbers:
    module, key_of = live.parameter_keys(optimizer)
    groups = [
        [(key_of_param(name, param, key_of), tuple(param.shape)) for param in params]
        for params, _ in group_options(optimizer)
    ]
    return _Numbers(module, groups)


def _problem(contents: Contents, name: str, numbers: _Numbers) -> str:
    """Why the numbers cannot be those of the live optimizer; "" if they can."""
    entry = contents.state[name]
    if entry.get("mapped"):
        return f"through a mapping nothing tells which number is which key; leave it out with ignore, {_BY_KEY}"
    sizes = [len(group["params"]) for group in entry["groups"]]
    if sizes != numbers.sizes:
        return (
            f"its groups have {sizes or 'no'} parameters, those of the live optimizer {numbers.sizes}; "
            f"make it with the param_groups that it was saved with, {_BY_KEY}"
        )
    by_number = numbers.by_number()
    if len({key for key, _ in by_number.values()}) != len(by_number):
        return f"several live parameters have one key; {_BY_KEY.removeprefix('or ')}"
    for label in contents.groups[name].tensors:
        number, _, state_name = label.rpartition("/")
        found = contents.find(name, label)
        if number not in by_number or found is None or not shaped_like_parameter(state_name):
            continue
        key, shape = by_number[number]
        if found.logical_shape != shape and math.prod(found.logical_shape) > 1:
            return (
                f"{label} is {list(found.logical_shape)}, and parameter {number} of the live optimizer, {key}, "
                f"is {list(shape)}; make it with its parameters in the order in which it was saved, {_BY_KEY}"
            )
    return ""


def _without(contents: Contents, name: str) -> Contents:
    groups = {own: group for own, group in contents.groups.items() if own != name}
    return replace(contents, groups=groups, state={own: e for own, e in contents.state.items() if own != name})


def _named(contents: Contents, name: str, numbers: _Numbers) -> Contents:
    keys = {number: key for number, (key, _) in numbers.by_number().items()}
    group, entry = contents.groups[name], contents.state[name]
    masters_name = masters_group(numbers.module)
    masters = dict(contents.groups[masters_name].tensors) if masters_name in contents.groups else {}
    tensors, logical = {}, {}
    for label, recipe in group.tensors.items():
        number, _, state_name = label.rpartition("/")
        if is_master(state_name) and number in keys:
            masters.setdefault(keys[number], recipe)
            continue
        kept = f"{keys.get(number, number)}/{state_name}"
        tensors[kept] = recipe
        if label in group.logical:
            logical[kept] = group.logical[label]
    groups = {**contents.groups, name: Group(group.kind, tensors, {}, logical)}
    if masters:
        groups[masters_name] = Group("masters", masters)
    return replace(contents, groups=groups, state={**contents.state, name: _named_entry(entry, keys)})


def _named_entry(entry: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    def named(number: str) -> str:
        return keys.get(number, number)

    groups = [{**group, "params": [named(number) for number in group["params"]]} for group in entry["groups"]]
    return {
        **{field_name: value for field_name, value in entry.items() if field_name != "numbered"},
        "groups": groups,
        "stateless": sorted(named(number) for number in entry.get("stateless", ())),
        "scalars": {named(number): values for number, values in entry.get("scalars", {}).items()},
    }
