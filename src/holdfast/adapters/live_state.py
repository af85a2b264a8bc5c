"""The live state, sorted: which values are modules, optimizers, stateful objects, tensors, JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.adapters.module import ModuleView, unwrap, view_module
from holdfast.adapters.optimizer import is_optimizer
from holdfast.adapters.tensors import mesh_of
from holdfast.adapters.tree import contains_tensor
from holdfast.core.errors import Unsupported
from holdfast.format.names import check_group, masters_group
from holdfast.layout.mesh import Mesh


@runtime_checkable
class Stateful(Protocol):
    """Anything that can tell its state and take it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class Reshards(Protocol):
    """A stateful object that can make its state for another mesh from the states of all coordinates."""

    def holdfast_reshard(self, states: Mapping[tuple[int, ...], Any], rank: int, world: int) -> Any:
        """The state to load on `rank` of `world`; `states` is by the coordinate that saved it."""


@runtime_checkable
class Averages(Protocol):
    """Averages of a module's tensors, such as `holdfast.EMA`: saved as a model of their own."""

    model: nn.Module

    def holdfast_averages(self) -> Mapping[str, Any]: ...

    def holdfast_count(self) -> dict[str, Any]: ...

    def holdfast_resume(self, count: Mapping[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True)
class LiveState:
    """Every value of a state under its kind, by name."""

    modules: dict[str, ModuleView] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    averages: dict[str, Averages] = field(default_factory=dict)
    statefuls: dict[str, Stateful] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, list[str]] = field(default_factory=dict)

    def averages_group(self, name: str) -> str:
        """The group of averages: a folder of their own, in which the files bear the module's name."""
        inner = unwrap(self.averages[name].model)
        module = next((own for own, view in self.modules.items() if view.module is inner), "model")
        return f"{name}/{module}"

    def own_owners(self) -> dict[str, list[str]]:
        """The modules of which each of this rank's optimizers holds parameters."""
        return {name: self._owners_of(optimizer) for name, optimizer in self.optimizers.items()}

    def _owners_of(self, optimizer: Any) -> list[str]:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return [name for name, view in self.modules.items() if held & view.parameter_keys().keys()]

    def parameter_keys(self, optimizer: Any) -> tuple[str, dict[int, str]]:
        """The module an optimizer belongs to, and keys of parameters by identity.

        Keys carry the module's name when the optimizer spans several modules, on any rank.
        """
        name = next((own for own, value in self.optimizers.items() if value is optimizer), "")
        owners = self.owners.get(name) or self._owners_of(optimizer)
        keys = {name: view.parameter_keys() for name, view in self.modules.items()}
        if len(owners) <= 1:
            owner = owners[0] if owners else "model"
            return owner, {identity: key for by_id in keys.values() for identity, key in by_id.items()}
        named = {identity: f"{owner}.{key}" for owner in owners for identity, key in keys.get(owner, {}).items()}
        return owners[0], named


def merge_owners(everyone: Iterable[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """The modules each optimizer spans over all ranks.

    A pipeline stage may hold parameters of one module only; its keys must be the others' all the same.
    """
    merged: dict[str, list[str]] = {}
    for answer in everyone:
        for name, owners in answer.items():
            known = merged.setdefault(name, [])
            known += [owner for owner in owners if owner not in known]
    return merged


def sort_state(state: Mapping[str, Any], ties: Mapping[str, str]) -> LiveState:
    """Put every value of the state under its kind; raises Unsupported for names that cannot be."""
    if not isinstance(state, MutableMapping):
        raise Unsupported(f"the state must be a dict of names to values, not a {type(state).__name__}")
    live = LiveState()
    folded: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise Unsupported(f"the name {name!r} in the state is not a text")
        check_group(name)
        twin = folded.setdefault(name.casefold(), name)
        if twin != name:
            raise Unsupported(f"the names {twin!r} and {name!r} differ only by case; rename one of them")
        _sort_value(live, name, value, ties)
    for module in live.modules:
        if masters_group(module) in state:
            raise Unsupported(f"the name {masters_group(module)!r} is kept for the masters of {module!r}")
    return live


def _sort_value(live: LiveState, name: str, value: Any, ties: Mapping[str, str]) -> None:
    if isinstance(value, nn.Module):
        live.modules[name] = view_module(name, value, ties)
    elif is_optimizer(value):
        live.optimizers[name] = value
    elif isinstance(value, Averages) and not isinstance(value, type):
        live.averages[name] = value
    elif isinstance(value, Stateful) and not isinstance(value, type):
        live.statefuls[name] = value
    elif isinstance(value, torch.Tensor) or contains_tensor(value, name):
        live.trees[name] = value
    else:
        live.values[name] = value


def live_mesh(live: LiveState, world: int, told: Any) -> Mesh:
    """The mesh a user gave (a DeviceMesh or a Mesh), or the one that is found."""
    if told is None:
        return _find_mesh(live, world)
    mesh = told if isinstance(told, Mesh) else mesh_of(told)
    if len(mesh.ranks) != world:
        raise Unsupported(f"mesh= must hold all {world} ranks; it holds {len(mesh.ranks)}")
    return mesh


def _find_mesh(live: LiveState, world: int) -> Mesh:
    """The mesh by which values that differ between ranks are kept: that of the tensors, if it has all ranks."""
    best = Mesh.line(world)
    for view in live.modules.values():
        for tensor in view.tensors.values():
            if isinstance(tensor, DTensor):
                mesh = mesh_of(tensor.device_mesh)
                if len(mesh.ranks) == world and len(mesh.axes) >= len(best.axes):
                    best = mesh
    return best
