"""Optimizers viewed by parameter key: states, master weights, declared flat shards; new states, assigned options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from holdfast.adapters.tensors import FlatShard, LikeShard
from holdfast.adapters.tree import Tree, contains_tensor, flatten
from holdfast.core.errors import LayoutError, Unsupported
from holdfast.core.names import MASTER_STATES

StateTensor = torch.Tensor | FlatShard | LikeShard


@runtime_checkable
class DeclaresShards(Protocol):
    """An optimizer that declares its flat shards with a single method.

    `holdfast_shards` returns every buffer to save and load, including before the first step. A load fills
    the same buffers in place. `param_groups` are saved as for any optimizer.
    """

    param_groups: list[dict[str, Any]]

    def holdfast_shards(self) -> Iterable[FlatShard]: ...


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """One rank's optimizer: state tensors and master weights with their keys, scalars, parameters.

    The tensors inside a state, as in the lists of LBFGS, have the keys "parameter key/state name.index".
    Copies of a tied weight that are separate parameters share a key; each copy is listed.
    """

    optimizer: Any
    tensors: list[tuple[str, StateTensor]] = field(default_factory=list)
    masters: list[tuple[str, StateTensor]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    nested: dict[str, dict[str, Any]] = field(default_factory=dict)  # states with tensors inside, as JSON
    params: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    master_name: str | None = None
    declared: bool = False


_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_STATES: dict[type, frozenset[str]] = {
    torch.optim.Adam: _MOMENTS,
    torch.optim.AdamW: _MOMENTS,
    torch.optim.RAdam: _MOMENTS,
    torch.optim.NAdam: _MOMENTS | {"mu_product"},
    torch.optim.Adamax: frozenset({"step", "exp_avg", "exp_inf"}),
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.RMSprop: frozenset({"step", "square_avg", "momentum_buffer", "grad_avg"}),
    torch.optim.Adagrad: frozenset({"step", "sum"}),
    torch.optim.Adadelta: frozenset({"step", "square_avg", "acc_delta"}),
    torch.optim.Rprop: frozenset({"step", "prev", "step_size"}),
    torch.optim.ASGD: frozenset({"step", "eta", "mu", "ax"}),
}


def state_names(optimizer: Any) -> frozenset[str]:
    """Return the state names that a torch optimizer may keep per parameter; empty for other optimizers."""
    return _STATES.get(type(optimizer), frozenset())


def shaped_like_parameter(state_name: str) -> bool:
    """Return True if torch's optimizers keep this state as a scalar or in the shape of its parameter."""
    return is_master(state_name) or any(state_name in names for names in _STATES.values())


def is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer | DeclaresShards)


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that holds this rank's state: the local one inside ZeroRedundancyOptimizer."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise Unsupported(
                "ZeroRedundancyOptimizer with overlap_with_ddp=True updates parameters outside of step hooks; "
                "create it without that option"
            )
        return optimizer.optim
    return optimizer


def view_optimizer(name: str, optimizer: Any, key_of: Mapping[int, str]) -> OptimizerView:
    """View an optimizer's state; `key_of` maps the identity of each parameter to its key."""
    if isinstance(optimizer, DeclaresShards):
        return _view_declared(name, optimizer, key_of)
    inner = inner_optimizer(optimizer)
    keyless = [
        key for key, value in inner.state.items() if not isinstance(key, torch.Tensor) and value not in ({}, None)
    ]
    if keyless:
        raise Unsupported(
            f"{name}: {type(inner).__name__} keeps state[{keyless[0]!r}], which belongs to no parameter and so has no "
            "key; wrap the optimizer in an object with its state_dict and load_state_dict, and save that object"
        )
    view = OptimizerView(inner, master_name=_master_name(inner))
    for param in (param for group in inner.param_groups for param in group["params"]):
        key = key_of_param(name, param, key_of)
        view.params.append((key, param))
        for state_name, value in inner.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                if is_master(state_name):
                    view.masters.append((key, value))
                else:
                    view.tensors.append((f"{key}/{state_name}", value))
            elif contains_tensor(value):
                tree = flatten_state(name, key, state_name, value)
                view.tensors.extend(tree.tensors.items())
                view.nested.setdefault(key, {})[state_name] = tree.value
            else:
                view.scalars.setdefault(key, {})[state_name] = value
    return view


def flatten_state(name: str, key: str, state_name: str, value: Any) -> Tree:
    """Extract the tensors inside a state of an optimizer; their keys begin with the parameter's."""
    place = f"{key}/{state_name}"
    tree = flatten(name, {place: value})
    return Tree(tree.value[place], tree.tensors)


def is_master(state_name: str) -> bool:
    """Return True if a state is an fp32 master weight, judged by the names that optimizers use."""
    return state_name in MASTER_STATES


def _master_name(optimizer: Any) -> str | None:
    return next((name for state in optimizer.state.values() for name in state if is_master(name)), None)


def _view_declared(name: str, optimizer: DeclaresShards, key_of: Mapping[int, str]) -> OptimizerView:
    view = OptimizerView(optimizer, master_name="master", declared=True)
    for shard in optimizer.holdfast_shards():
        key = shard.param if isinstance(shard.param, str) else key_of_param(name, shard.param, key_of)
        if is_master(shard.state):
            view.masters.append((key, shard))
        else:
            view.tensors.append((f"{key}/{shard.state}", shard))
    return view


def key_of_param(name: str, param: torch.Tensor, key_of: Mapping[int, str]) -> str:
    key = key_of.get(id(param))
    if key is None:
        raise LayoutError(
            f"{name}: a parameter of shape {list(param.shape)} belongs to no module in the state; "
            "add its module to the state, so that the optimizer's state has keys"
        )
    return key


def spanned_params(optimizer: Any, key_of: Mapping[int, str], name: str) -> list[list[Any]] | None:
    """Return the keys and sizes of all parameters, in order, if one state belongs to all of them, as in LBFGS."""
    inner = inner_optimizer(optimizer)
    if not isinstance(inner, torch.optim.LBFGS):
        return None
    params = (param for params, _ in group_options(inner) for param in params)
    return [[key_of_param(name, param, key_of), param.numel()] for param in params]


def group_options(optimizer: Any) -> Iterator[tuple[list[torch.Tensor], dict[str, Any]]]:
    """Yield the parameters and options of each param group."""
    for group in optimizer.param_groups:
        yield group["params"], {option: value for option, value in group.items() if option != "params"}


def new_state(
    param: torch.Tensor, state_name: str, shape: tuple[int, ...], dtype: torch.dtype, group: dict[str, Any]
) -> torch.Tensor:
    """Allocate a state that an optimizer has not created yet, with the layout the optimizer would use."""
    if shape == tuple(param.shape) and (shape or state_name != "step"):
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    on_device = state_name != "step" or group.get("capturable") or group.get("fused")
    local = param.to_local() if isinstance(param, DTensor) else param
    return torch.empty(shape, dtype=dtype, device=local.device if on_device else "cpu")


def assign_options(optimizer: Any, options_of: Mapping[int, dict[str, Any]]) -> list[str]:
    """Assign to each parameter, by identity, the options it was saved with; returns notes on split groups.

    A live group whose parameters were saved with different options is split, so that every parameter
    keeps its own options.
    """
    notes = []
    for index, group in enumerate(list(optimizer.param_groups)):
        by_options: dict[int, list[torch.Tensor]] = {}
        kept = []
        for param in group["params"]:
            if id(param) in options_of:
                by_options.setdefault(id(options_of[id(param)]), []).append(param)
            else:
                kept.append(param)
        chosen = [(options_of[id(params[0])], params) for params in by_options.values()]
        if not chosen:
            continue
        _update_group(group, chosen[0][0])
        group["params"] = [*chosen[0][1], *kept] if len(chosen) > 1 else group["params"]
        for options, params in chosen[1:]:
            extra = {**group, "params": params}
            _update_group(extra, options)
            optimizer.param_groups.append(extra)
            notes.append(f"group {index}: {len(params)} parameters were saved with other options; moved to a new group")
    return notes


def _update_group(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        live = group.get(option)
        if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor | float | int):
            live.fill_(value)
        else:
            group[option] = value.clone() if isinstance(value, torch.Tensor) else value
