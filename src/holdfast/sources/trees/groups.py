"""Classified parts of a foreign tree to groups and state.json entries: masters, averages, DDP prefixes, the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.core.names import check_group
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.sources.foreign import ReaderResult
from holdfast.sources.trees.classify import OTHERS, classify_tree
from holdfast.sources.trees.leaf import TensorLeaf, dotted, group_of, keyed, plain_paths, state_entry
from holdfast.sources.trees.stored_blocks import stored_files
from holdfast.sources.trees.torch_optimizer import (
    MASTERS,
    OptimizerState,
    keys_of,
    master_name,
    numbers_of,
    optimizer_entry,
)

_STEPS = ("step", "global_step", "iteration")
_TRAIN_STATE = "train_state"  # where torchtitan stores the step
_MASTERS_GROUP = "master_weights"
_DDP = "module."
_NAMED = 5


def result_of_tree(
    format_name: str, tree: Any, where: str, made: Mapping[str, bytes] | None = None, *, unwrap_ddp: bool = False
) -> ReaderResult:
    """Return a reader's result for a tree of values and tensors, sorted into groups.

    With `unwrap_ddp`, a model whose keys all begin with "module." is treated as wrapped by DDP.
    """
    parts = classify_tree(tree)
    collector = _GroupCollector(where, unwrap_ddp=unwrap_ddp)
    collector.put_model(parts.model)
    modules = {name: collector.put_module(name, value) for name, value in parts.others.items()}
    for name, optimizer in parts.optimizers.items():
        collector.put_optimizer(name, optimizer)
    for name, value in parts.others.items():
        collector.put_other(name, modules[name] or value, tensors=not modules[name])
    groups = collector.groups
    if not groups:
        raise Unsupported(f"{where}: contains no tensors")
    step, step_at = _step(parts.others)
    contents = Contents(groups, stored_files(groups.values(), where), collector.state, step)
    return ReaderResult(format_name, contents, made or {}, tuple(collector.notes), step_at)


@dataclass(slots=True)
class _GroupCollector:
    """The groups and state entries collected so far."""

    where: str
    unwrap_ddp: bool = False
    model: dict[str, TensorLeaf] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put_model(self, value: Mapping[str, Any]) -> None:
        self.model = keyed(value, "model", self.where)
        if self.unwrap_ddp and self.model and all(key.startswith(_DDP) and key != _DDP for key in self.model):
            self.model = _without_ddp(self.model)
            self.notes.append(f"{self.where}: removed the DDP prefix {_DDP!r} from every key of the model")
        if self.model:
            self.groups["model"] = group_of("module", self.model, tie=True)
        plain = [dotted(path) for path in plain_paths(value)]
        if plain:
            more = ", ..." if len(plain) > _NAMED else ""
            self.notes.append(
                f"{self.where}: left out: {len(plain)} values of the model that are not tensors: "
                f"{', '.join(path[:80] for path in plain[:_NAMED])}{more}"
            )

    def put_module(self, name: str, value: Any) -> dict[str, TensorLeaf]:
        """Add a dict of tensors that is another module: an average of the model, its master weights, another model.

        Returns its tensors by key, or an empty dict if it is something else.
        """
        if not isinstance(value, dict) or not all(
            type(k) is str and isinstance(v, TensorLeaf) for k, v in value.items()
        ):
            return {}
        tensors = keyed(value, name, self.where)
        if not self._is_of_model(tensors) and self._is_of_model(_without_ddp(tensors)):
            tensors = _without_ddp(tensors)
        if not self._is_of_model(tensors):
            if not any(key.endswith(("weight", "bias")) for key in tensors):
                return {}
            self.groups[_free(_group_name(name), self.groups)] = group_of("module", tensors, tie=True)
        elif name == _MASTERS_GROUP:
            self.groups[name] = group_of("masters", tensors)
        elif name.endswith(".model") and _group_name(name) == name:  # conversions to DCP write averages this way
            self.groups[f"{name.removesuffix('.model')}/model"] = group_of("module", tensors, tie=True)
        else:
            self.groups[_free(_group_name(name), self.groups)] = group_of("module", tensors, tie=True)
            self.notes.append(
                f"{self.where}: {name} has keys and shapes of the model and becomes a separate group: "
                "a mapping for the model does not apply to it"
            )
        return tensors

    def _is_of_model(self, tensors: Mapping[str, TensorLeaf]) -> bool:
        known = self.model
        return bool(tensors) and all(key in known and known[key].shape == leaf.shape for key, leaf in tensors.items())

    def put_optimizer(self, name: str, optimizer: OptimizerState) -> None:
        name = _free(_group_name(name), self.groups)
        modules = [group for group in self.groups.values() if group.kind == "module"]
        keys = keys_of(optimizer, {key for group in modules for key in (*group.tensors, *group.aliases)})
        if keys is None:
            self._put_numbered(name, optimizer)
            return
        tensors: dict[str, TensorLeaf] = {}
        masters: dict[str, TensorLeaf] = {}
        for param, states in optimizer.state.items():
            for state_name, value in states.items():
                if isinstance(value, TensorLeaf) and state_name in MASTERS:
                    masters[keys[param]] = value
                elif isinstance(value, TensorLeaf):
                    tensors[f"{keys[param]}/{state_name}"] = value
        self.groups[name] = group_of("optimizer", keyed(tensors, name, self.where))
        self.state[name] = optimizer_entry(optimizer, keys, name, masters=master_name(optimizer))
        if masters:
            self._put_masters(keyed(masters, _MASTERS_GROUP, self.where))

    def _put_masters(self, masters: Mapping[str, TensorLeaf]) -> None:
        """Add master weights for the module that has all their keys; duplicates in a file are taken once."""
        owners = [name for name, group in self.groups.items() if group.kind == "module" and "/" not in name]
        owners = [name for name in owners if _holds(self.groups[name], masters)]
        free = [name for name in owners if _masters_of(name) not in self.groups]
        name = _masters_of(next(iter((*free, *owners)), "model"))
        known = self.groups.get(name)
        added = group_of("masters", masters)
        if known is not None:
            added = Group("masters", {**added.tensors, **known.tensors}, {}, {**added.logical, **known.logical})
        self.groups[name] = added

    def _put_numbered(self, name: str, optimizer: OptimizerState) -> None:
        """Add an optimizer that only numbers its parameters: only the live optimizer knows their keys."""
        keys = numbers_of(optimizer)
        tensors = {
            f"{keys[param]}/{state_name}": value
            for param, states in optimizer.state.items()
            for state_name, value in states.items()
            if isinstance(value, TensorLeaf)
        }
        self.groups[name] = group_of("optimizer", keyed(tensors, name, self.where))
        self.state[name] = optimizer_entry(optimizer, keys, name, masters=master_name(optimizer), numbered=True)
        self.notes.append(
            f"{self.where}: {name} has its parameters by number, and nothing in it maps numbers to keys: "
            "they stay numbers, which load() takes in the order of the live optimizer's param_groups, as torch does; "
            "to store them by key, save an optimizer created with model.named_parameters()"
        )

    def put_other(self, name: str, value: Any, *, tensors: bool) -> None:
        """Add a value and, unless they already form a group, its tensors."""
        own = keyed(value, name, self.where) if tensors else {}
        if own:
            self.groups[_free(_group_name(name), self.groups)] = group_of("tensors", own)
        elif name not in self.groups and not tensors:
            return  # averages and masters have no state entry
        try:
            self.state[name] = state_entry(value, name)
        except Unsupported as error:
            self.notes.append(f"{self.where}: left out: {error}")


def _holds(group: Group, tensors: Mapping[str, TensorLeaf]) -> bool:
    return all(key in group.tensors and group.tensors[key].shape == leaf.shape for key, leaf in tensors.items())


def _masters_of(module: str) -> str:
    return _MASTERS_GROUP if module == "model" else f"{module}.{_MASTERS_GROUP}"


def _without_ddp(tensors: Mapping[str, TensorLeaf]) -> dict[str, TensorLeaf]:
    return {key.removeprefix(_DDP): leaf for key, leaf in tensors.items()}


def _group_name(name: str) -> str:
    try:
        check_group(name)
    except Unsupported:
        return OTHERS
    return name


def _free(name: str, groups: Mapping[str, Group]) -> str:
    """Return the name, or a numbered variant if a group already has it."""
    return next(text for text in (name, *(f"{name}-{n}" for n in range(2, len(groups) + 3))) if text not in groups)


def _step(values: Mapping[str, Any]) -> tuple[int | None, Recipe[Place] | None]:
    """Return the step, or the recipe of the step if it is a tensor of one element."""
    inner = values.get(_TRAIN_STATE)
    for level in (values, inner if isinstance(inner, dict) else {}):
        for name in _STEPS:
            value = level.get(name)
            if type(value) is int and 0 <= value < 2**53:
                return value, None
            if isinstance(value, TensorLeaf) and math.prod(value.shape) == 1 and value.logical is None:
                return None, value.recipe
    return None, None
