"""The live state sorted by kind (modules, optimizers, stateful objects, tensors, values), optimizer owners, mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.adapters.module import ModuleView, has_peft_config, is_pretrained, unwrap, view_module
from holdfast.adapters.optimizer import is_optimizer
from holdfast.adapters.peft import AdapterParts, adapter_views, peft_model
from holdfast.adapters.tensors import mesh_of
from holdfast.adapters.tree import contains_tensor
from holdfast.core.errors import Unsupported
from holdfast.core.names import check_group, is_group_of, masters_group
from holdfast.layout.coordinates import CoordinateChange
from holdfast.layout.placement import Mesh


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class Reshards(Protocol):
    """A stateful object that can rebuild its state for another mesh from the states of all coordinates."""

    def holdfast_reshard(self, states: Mapping[tuple[int, ...], Any], rank: int, world: int) -> Any:
        """Return the state to load on `rank` of `world`; `states` maps each saved coordinate to its state."""


@runtime_checkable
class ReshardsAt(Protocol):
    """As `Reshards`, by the coordinates of the live mesh along the axes on which the saved states differ.

    `reshard_note` goes into the notes of the report, if it is not empty after a load.
    """

    reshard_note: str

    def holdfast_reshard_at(
        self, states: Mapping[tuple[int, ...], Any], coordinate: tuple[int, ...], change: CoordinateChange
    ) -> Any:
        """Return the state to load at `coordinate`; (rank,) on a mesh that lacks one of the axes.

        `change` names the coordinates that only the saved or only the live mesh has, for the note.
        """


@runtime_checkable
class FollowsLive(Protocol):
    """A stateful object whose state, if all ranks share it in a checkpoint, may become another one on each rank.

    Which ranks have equal live states tells what the program means to be equal.
    """

    def holdfast_live_parts(self, live: Any) -> dict[str, str]:
        """Return a digest of each part of a state of this rank."""

    def holdfast_follow_live(self, state: Any, leaders: Mapping[str, Sequence[int]], rank: int) -> Any:
        """Return the state to load on `rank`. `leaders` has by part, for each rank, the first with an equal one."""


@runtime_checkable
class Averages(Protocol):
    """Averages of a module's tensors, such as `holdfast.EMA`; saved as a separate model."""

    model: nn.Module

    def holdfast_averages(self) -> Mapping[str, Any]: ...

    def holdfast_count(self) -> dict[str, Any]: ...

    def holdfast_resume(self, count: Mapping[str, Any], /) -> None: ...


@dataclass(frozen=True, slots=True)
class LiveState:
    """The values of a state, grouped by kind and keyed by name."""

    modules: dict[str, ModuleView] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    averages: dict[str, Averages] = field(default_factory=dict)
    statefuls: dict[str, Stateful] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, list[str]] = field(default_factory=dict)
    parts: dict[str, AdapterParts] = field(default_factory=dict)  # of the modules stored as adapters
    entries: dict[str, nn.Module] = field(default_factory=dict)  # the modules under their names in the state

    def averages_views(self, name: str) -> dict[str, ModuleView]:
        """Return the groups of averages with the views of the module that they average.

        They have a folder of their own, with files named after the module.
        """
        model = self.averages[name].model
        inner = unwrap(model)
        for entry, module in self.entries.items():
            if unwrap(module) is inner:
                own = {group: view for group, view in self.modules.items() if is_group_of(group, entry)}
                return {f"{name}/{group}": view for group, view in own.items() if view.module is inner}
        entry = f"{name}/model"
        if entry in self.parts:
            return dict(adapter_views(entry, model, {}, self.parts[entry]))
        return {entry: view_module(name, model, {})}

    @property
    def groups(self) -> list[str]:
        """The groups of tensors of this rank's state."""
        averages = [group for name in self.averages for group in self.averages_views(name)]
        return [*self.modules, *self.optimizers, *averages, *self.trees]

    @property
    def pretrained(self) -> list[str]:
        """The models of transformers. Those stored as PEFT adapters are not among them: they keep PEFT's names."""
        whole = (name for name in self.modules if name in self.entries and name not in self.parts)
        return [name for name in whole if is_pretrained(self.modules[name].module)]

    def own_owners(self) -> dict[str, list[str]]:
        """Return the modules whose parameters each optimizer of this rank holds."""
        return {name: self._owners_of(optimizer) for name, optimizer in self.optimizers.items()}

    def _owners_of(self, optimizer: Any) -> list[str]:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return [name for name, view in self.modules.items() if held & view.parameter_keys().keys()]

    def parameter_keys(self, optimizer: Any) -> tuple[str, dict[int, str]]:
        """Return the module an optimizer belongs to, and the parameter keys by identity.

        Keys are prefixed with the module's name if the optimizer spans several modules on any rank.
        """
        name = next((own for own, value in self.optimizers.items() if value is optimizer), "")
        owners = self.owners.get(name) or self._owners_of(optimizer)
        keys = {name: view.parameter_keys() for name, view in self.modules.items()}
        if len(owners) <= 1:
            owner = owners[0] if owners else "model"
            return owner, {identity: key for by_id in keys.values() for identity, key in by_id.items()}
        named = {identity: f"{owner}.{key}" for owner in owners for identity, key in keys.get(owner, {}).items()}
        return owners[0], named


def has_adapters(state: Any) -> bool:
    """Return True if a module in the state has adapters that PEFT may be able to save."""
    return isinstance(state, Mapping) and any(has_peft_config(value) for value in state.values())


def merge_owners(answers: Iterable[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """Return the modules that each optimizer spans over all ranks.

    A pipeline stage may hold parameters of one module only; its keys must still match those of other ranks.
    """
    merged: dict[str, list[str]] = {}
    for answer in answers:
        for name, owners in answer.items():
            known = merged.setdefault(name, [])
            known += [owner for owner in owners if owner not in known]
    return merged


def classify_state(
    state: Mapping[str, Any], ties: Mapping[str, str], parts: Mapping[str, AdapterParts] | None = None
) -> LiveState:
    """Group the values of the state by kind; raises Unsupported for invalid names.

    `parts` are the modules that are stored as PEFT adapters; any other module is stored as it is.
    """
    if not isinstance(state, MutableMapping):
        raise Unsupported(f"the state must be a dict of names to values, not a {type(state).__name__}")
    live = LiveState(parts=dict(parts or {}))
    folded: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise Unsupported(f"the name {name!r} in the state is not a string")
        check_group(name)
        twin = folded.setdefault(name.casefold(), name)
        if twin != name:
            raise Unsupported(f"the names {twin!r} and {name!r} differ only by case; rename one of them")
        _classify_value(live, name, value, ties)
    for module in live.modules:
        if masters_group(module) in state:
            raise Unsupported(f"the name {masters_group(module)!r} is reserved for the master weights of {module!r}")
    return live


def _classify_value(live: LiveState, name: str, value: Any, ties: Mapping[str, str]) -> None:
    if isinstance(value, nn.Module):
        _view_entry(live, name, value, ties)
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


def _view_entry(live: LiveState, name: str, module: nn.Module, ties: Mapping[str, str]) -> None:
    live.entries[name] = module
    if name not in live.parts or peft_model(module) is None:
        views = {name: view_module(name, module, ties)}
    else:
        views = dict(adapter_views(name, module, ties, live.parts[name]))
    for group, view in views.items():
        check_group(group)
        if group in live.modules:
            raise Unsupported(f"two modules or adapters would both be stored as {group!r}; rename one of them")
        live.modules[group] = view


def live_mesh(live: LiveState, world: int, explicit: Any) -> Mesh:
    """Return the explicit mesh (a DeviceMesh or a Mesh), or infer one from the tensors."""
    if explicit is None:
        return _infer_mesh(live, world)
    mesh = explicit if isinstance(explicit, Mesh) else mesh_of(explicit)
    if len(mesh.ranks) != world:
        raise Unsupported(f"mesh= must contain all {world} ranks; it contains {len(mesh.ranks)}")
    return mesh


def _infer_mesh(live: LiveState, world: int) -> Mesh:
    """Return the mesh that indexes values differing between ranks: the tensors' mesh if it spans all ranks."""
    best = Mesh.line(world)
    for view in live.modules.values():
        for tensor in view.tensors.values():
            if isinstance(tensor, DTensor):
                mesh = mesh_of(tensor.device_mesh)
                if len(mesh.ranks) == world and len(mesh.axes) >= len(best.axes):
                    best = mesh
    return best
