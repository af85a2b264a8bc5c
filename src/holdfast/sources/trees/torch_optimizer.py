"""Parse torch optimizer state by key or number, nested or flat; its master weights and state.json entry.

All become one form: state by parameter key and state name, and options of param groups.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.core.names import MASTER_STATES
from holdfast.format import statejson, strictjson
from holdfast.sources.trees.leaf import TensorLeaf

_MEGATRON_MASTERS = frozenset({"fp32_param", "param"})
MASTERS = MASTER_STATES | _MEGATRON_MASTERS
_STATE_NAMES = "exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|step|master_exp_avg|" + "|".join(sorted(MASTERS))
_STATE_FIRST = re.compile(rf"state\.({_STATE_NAMES})\.(.+)")  # Megatron's order
_PARAM_FIRST = re.compile(r"state\.(.+)\.([^.]+)")
_OPTION = re.compile(r"param_groups\.(.+)\.([^.]+)")


@dataclass(slots=True)
class OptimizerState:
    """State by parameter key or number, and the options of each param group."""

    state: dict[Any, dict[str, Any]] = field(default_factory=dict)
    groups: list[tuple[list[Any], dict[str, Any]]] = field(default_factory=list)
    names: dict[Any, str] = field(default_factory=dict)  # the key of each number, if the file has it

    @property
    def params(self) -> list[Any]:
        """Every parameter, beginning with those of the groups."""
        grouped = [param for params, _ in self.groups for param in params]
        return list(dict.fromkeys([*grouped, *self.state]))


def optimizer_in(value: Any) -> OptimizerState | None:
    """Parse a tree as optimizer state; None if it is something else."""
    if not isinstance(value, dict) or not value:
        return None
    if set(value) <= {"state", "param_groups"} and isinstance(value.get("state", {}), dict):
        return _nested(value)
    if all(type(key) is str and key.startswith(("state.", "param_groups.")) for key in value):
        return _flat(value)
    return None


def _nested(value: Mapping[str, Any]) -> OptimizerState | None:
    optimizer = OptimizerState()
    for param, states in value.get("state", {}).items():
        if not isinstance(states, dict) or not all(type(name) is str for name in states):
            return None
        optimizer.state[param] = dict(states)
    groups = value.get("param_groups", [])
    if not isinstance(groups, list | tuple):
        return None
    for group in groups:
        params = group.get("params") if isinstance(group, dict) else None
        if not isinstance(params, list | tuple) or not all(isinstance(param, str | int) for param in params):
            return None
        names = group.get("param_names")
        if isinstance(names, list | tuple) and len(names) == len(params) and all(type(n) is str for n in names):
            optimizer.names |= dict(zip(params, names, strict=True))
        options = {name: item for name, item in group.items() if name not in ("params", "param_names")}
        optimizer.groups.append((list(params), options))
    numbers = {str(param): param for params, _ in optimizer.groups for param in params if type(param) is int}
    optimizer.state = {
        numbers.get(param, param): states for param, states in optimizer.state.items()
    }  # DCP makes texts of them
    if not optimizer.groups and all(re.fullmatch("[0-9]{1,9}", str(param)) for param in optimizer.state):
        optimizer.state = {int(param): states for param, states in optimizer.state.items()}
    return optimizer


def _flat(value: Mapping[str, Any]) -> OptimizerState | None:
    optimizer = OptimizerState()
    options: dict[str, dict[str, Any]] = {}
    for key, item in value.items():
        megatron, torch, option = _STATE_FIRST.fullmatch(key), _PARAM_FIRST.fullmatch(key), _OPTION.fullmatch(key)
        if megatron is not None and not re.fullmatch(_STATE_NAMES, key.rpartition(".")[2]):
            optimizer.state.setdefault(megatron[2], {})[megatron[1]] = item
        elif torch is not None:
            optimizer.state.setdefault(torch[1], {})[torch[2]] = item
        elif option is not None:
            options.setdefault(option[1], {})[option[2]] = item
        else:
            return None
    groups: dict[bytes, tuple[list[Any], dict[str, Any]]] = {}
    for param, unsorted in options.items():
        own = dict(sorted(unsorted.items()))
        params, _ = groups.setdefault(strictjson.dumps(encoded_options(own, param)), ([], own))
        params.append(param)
    optimizer.groups = list(groups.values())
    return optimizer


def master_name(optimizer: OptimizerState) -> str | None:
    """Return the optimizer's own name for its master weights; Megatron stores them elsewhere."""
    names = (
        name for states in optimizer.state.values() for name, value in states.items() if isinstance(value, TensorLeaf)
    )
    return next((name for name in names if name in MASTER_STATES), None)


def encoded_options(options: Mapping[str, Any], where: str) -> Any:
    """Encode options for state.json; options that cannot be encoded, and tensors, are left out."""
    out = {}
    for name, value in options.items():
        try:
            out[name] = statejson.encode(value, f"{where}.{name}")
        except Unsupported:
            continue
    return out


def keys_of(optimizer: OptimizerState, model: Container[str] = ()) -> dict[Any, str] | None:
    """Return the key of every parameter, or None if the file has only numbers.

    The order of a file says nothing about numbers: an optimizer numbers its parameters in the order in which
    it received them, which only the live optimizer knows. If there is a model, names are used only if they are
    the model's, with or without the "module." of DDP.
    """
    params = optimizer.params
    if all(type(param) is str for param in params):
        names = {param: param for param in params}
        return _in_model(names, model) or names
    if not all(param in optimizer.names for param in params):
        return None
    names = {param: optimizer.names[param] for param in params}
    return names if not model else _in_model(names, model)


def _in_model(names: Mapping[Any, str], model: Container[str]) -> dict[Any, str] | None:
    bare = {param: key.removeprefix("module.") for param, key in names.items()}
    for keys in (dict(names), bare):
        if all(key in model for key in keys.values()) and len(set(keys.values())) == len(keys):
            return keys
    return None


def numbers_of(optimizer: OptimizerState) -> dict[Any, str]:
    """Return the number of every parameter: its position over the groups, as torch counts."""
    return {param: str(number if optimizer.groups else param) for number, param in enumerate(optimizer.params)}


def optimizer_entry(
    optimizer: OptimizerState, keys: Mapping[Any, str], name: str, *, masters: str | None = None, numbered: bool = False
) -> dict[str, Any]:
    """Return the state.json entry: options by group, and non-tensor state by parameter.

    `masters` is the optimizer's name for its master weights. `numbered` entries have numbers as keys.
    """
    scalars: dict[str, Any] = {}
    with_state = set()
    for param, states in optimizer.state.items():
        plain = encoded_options({n: v for n, v in states.items() if not isinstance(v, TensorLeaf)}, f"{name}.{param}")
        if plain:
            scalars[keys[param]] = plain
        if states:
            with_state.add(keys[param])
    stateless = [keys[param] for param in optimizer.params if keys[param] not in with_state]
    return {
        "kind": "optimizer",
        "groups": _option_groups(optimizer.groups, keys, name),
        "stateless": sorted(stateless),
        "scalars": scalars,
        "masters": masters,
        **({"numbered": True} if numbered else {}),
    }


def _option_groups(
    groups: Sequence[tuple[list[Any], dict[str, Any]]], keys: Mapping[Any, str], name: str
) -> list[dict[str, Any]]:
    return [
        {"params": [keys[param] for param in params], "options": encoded_options(options, f"{name}.param_groups")}
        for params, options in groups
    ]
