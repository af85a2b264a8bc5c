"""A cache of the collected state between saves, valid while no tensor is added, removed or moved.

A save inspects every tensor of modules and optimizers. Between saves these are usually the same objects
in the same memory, which the cache checks by identity. Values that are not tensors are always read again.
The cache holds only weak references to tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.adapters.hooks import has_plain_state_dict
from holdfast.adapters.huggingface import CONFIG_FILES
from holdfast.adapters.live_state import LiveState, classify_state
from holdfast.adapters.module import unwrap
from holdfast.adapters.optimizer import DeclaresShards, inner_optimizer
from holdfast.adapters.optimizer_options import option_groups
from holdfast.adapters.peft import AdapterParts
from holdfast.adapters.saving.collect import Chooses, Collected, SaveItem, collect_values
from holdfast.adapters.saving.entry_files import entry_files, plan_of
from holdfast.adapters.subclass_tensors import is_subclass, plain_tensors
from holdfast.adapters.tensors import Holder, Holders, has_memory, memory_of, without_grad
from holdfast.adapters.weight_wrappers import local_tensor
from holdfast.format import statejson
from holdfast.format.dtypes import DType
from holdfast.plan.state_references import references

_PLAIN = ("state_dict", "_save_to_state_dict")
_SIMPLE = (torch.Tensor, nn.Parameter)
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")


@dataclass(frozen=True, slots=True)
class _CachedTensor:
    """One tensor: a weak reference, its memory, and the fields of its save item."""

    tensor: weakref.ref[torch.Tensor]
    memory: tuple[Any, ...]
    name: tuple[str, str, str, DType | None, str]  # group, key, role, cast, outer
    layout: tuple[Any, ...]

    def item(self) -> SaveItem | None:
        """Return the save item; None if the tensor is gone or has other memory."""
        value: Any = self.tensor()
        if value is None:
            return None
        if not has_memory(value, self.memory):
            return None
        local = local_tensor(value)
        group, key, role, cast, outer = self.name
        logical, shape, parts, how = self.layout
        holder = Holder(logical, shape, parts, without_grad(local), how)
        return SaveItem(group, key, role, holder, cast, self.tensor, outer)


@dataclass(frozen=True, slots=True)
class _CachedOptimizer:
    """An optimizer's parameters with their keys, the names of their states, and its entry in state.json."""

    optimizer: weakref.ref[Any]
    groups: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[str, ...], ...]
    states: tuple[tuple[Any, ...], ...]
    entry: Mapping[str, Any]

    def current_entry(self, optimizer: Any, name: str) -> dict[str, Any] | None:
        """Return the entry with current options and scalars; None if anything else has changed."""
        inner = inner_optimizer(optimizer)
        if self.optimizer() is not optimizer or _groups_of(inner) != self.groups or _states_of(inner) != self.states:
            return None
        scalars: dict[str, Any] = {}
        for group, keys in zip(inner.param_groups, self.keys, strict=True):
            for param, key in zip(group["params"], keys, strict=True):
                plain = {n: v for n, v in inner.state.get(param, {}).items() if not isinstance(v, torch.Tensor)}
                if plain:
                    scalars[key] = statejson.encode(plain, f"{name}[{key}]")
        return {**self.entry, "groups": option_groups(optimizer, name, self.keys), "scalars": scalars}


class CollectCache:
    """A cache of the result of `collect` for one state."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._modules: dict[str, Any] = {}
        self._parts: dict[str, AdapterParts] = {}
        self._optimizers: dict[str, _CachedOptimizer] = {}
        self._tensors: list[_CachedTensor] = []
        self._ties: list[tuple[weakref.ref[torch.Tensor], Any]] = []
        self._collected: Collected | None = None

    def store(self, state: Mapping[str, Any], live: LiveState, collected: Collected) -> None:
        """Cache the collected state, if later changes to it can be detected."""
        self._collected = None
        plain = all(_is_plain(view.module) and not view.extra for view in live.modules.values())
        for optimizer in live.optimizers.values():
            plain = plain and has_plain_state_dict(optimizer) and not isinstance(optimizer, DeclaresShards)
        plain = plain and not any(references(entry["scalars"]) for entry in collected.optimizers.values())
        tensors = [_cached_tensor(item) for item in collected.items[: collected.fixed]]
        if not plain or live.averages or any(tensor is None for tensor in tensors):
            return
        self._names = list(state)
        self._modules = {name: _structure(state[name]) for name in live.entries}
        self._parts = dict(live.parts)
        self._optimizers = {name: _cached_optimizer(state[name], entry) for name, entry in collected.optimizers.items()}
        self._tensors = [tensor for tensor in tensors if tensor is not None]
        # Tied tensors have no item of their own; a tensor that is untied later needs one.
        ties = [view.tensors[alias] for view in live.modules.values() for alias in view.ties if alias in view.tensors]
        memories = [memory_of(tensor) for tensor in ties]
        if any(memory is None for memory in memories):
            return
        self._ties = [(weakref.ref(tensor), memory) for tensor, memory in zip(ties, memories, strict=True)]
        self._collected = Collected(
            kinds={n: kind for n, kind in collected.kinds.items() if n not in live.trees},
            aliases=dict(collected.aliases),
            owners=dict(collected.owners),
            files=dict.fromkeys(collected.files, b""),
            subclasses={n: dict(found) for n, found in collected.subclasses.items() if n not in live.trees},
        )

    def lookup(
        self, state: Mapping[str, Any], holders: Holders, model_dtype: str | None, selection: Chooses | None = None
    ) -> Collected | None:
        """Return the result of `collect`; None if the state is not the cached one."""
        cached = self._collected
        if cached is None or list(state) != self._names:
            return None
        if any(_structure(state[name]) != structure for name, structure in self._modules.items()):
            return None
        if any((tied := tensor()) is None or not has_memory(tied, memory) for tensor, memory in self._ties):
            return None
        items = [tensor.item() for tensor in self._tensors]
        entries = {name: optimizer.current_entry(state[name], name) for name, optimizer in self._optimizers.items()}
        if None in items or None in entries.values():
            return None
        out = Collected(
            items=[item for item in items if item is not None],
            kinds=dict(cached.kinds),
            aliases=dict(cached.aliases),
            optimizers={name: entry for name, entry in entries.items() if entry is not None},
            owners=dict(cached.owners),
            live_optimizers={name: state[name] for name in self._optimizers},
            holders=holders,
            selection=selection,
            subclasses={name: dict(found) for name, found in cached.subclasses.items()},
        )
        plain = CONFIG_FILES[0] in cached.files  # "model" had no adapters, and its submodules are the same
        for name in self._modules:
            if cached.files:
                out.files |= entry_files(
                    name, unwrap(state[name]), self._parts.get(name), model_dtype, same_modules=plain
                )
            out.plans |= plan_of(name, unwrap(state[name]))
        known = self._modules.keys() | self._optimizers.keys()
        rest = classify_state({name: value for name, value in state.items() if name not in known}, {})
        out.live_optimizers |= rest.optimizers  # those of which nothing is selected
        collect_values(out, rest)
        return out


def _cached_tensor(item: SaveItem) -> _CachedTensor | None:
    value = item.source() if item.source is not None else None
    if value is None:
        return None
    local = local_tensor(value)
    holder = item.holder
    memory = memory_of(value)
    if memory is None or not memory[0] or memory[0] != holder.local.data_ptr() or local.dtype != holder.local.dtype:
        return None
    layout = (holder.logical, holder.shape, holder.parts, holder.how)
    name = item.group, item.key, item.role, item.cast, item.outer
    return _CachedTensor(weakref.ref(value), memory, name, layout)


def _is_plain(module: nn.Module) -> bool:
    """Return True if a module's state_dict has no overrides, and no hooks other than torch's own."""
    for part in module.modules():
        own = vars(part)
        if any(name in own or getattr(type(part), name) is not getattr(nn.Module, name) for name in _PLAIN):
            return False
        hooks = [hook for name in _HOOKS for hook in getattr(part, name, {}).values()]
        if not all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks):
            return False
    return True


def _structure(module: Any) -> list[Any] | None:
    """Return the names and identities of a module's submodules and tensors."""
    if not isinstance(module, nn.Module):
        return None
    out = []
    for part in _submodules(module):
        tensors = (part._parameters, part._buffers)
        names = [*part._modules, *part._parameters, *part._buffers]
        members = [*map(id, part._modules.values()), *(_identity(value) for held in tensors for value in held.values())]
        hooks = len(part._state_dict_hooks), len(part._state_dict_pre_hooks)
        out.append((weakref.ref(part), names, sorted(part._non_persistent_buffers_set), members, hooks))
    return out


def _submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield each module of a model once. `modules()` resumes a generator per level for each: every save walks here."""
    waiting, seen = [module], {id(module)}
    while waiting:
        part = waiting.pop()
        yield part
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _identity(value: Any) -> Any:
    """Return the identities of a tensor and of the tensors inside, if it is a subclass that wraps others."""
    if type(value) in _SIMPLE or not is_subclass(value):
        return id(value)
    return id(value), *map(id, plain_tensors(value))


def _cached_optimizer(optimizer: Any, entry: Mapping[str, Any]) -> _CachedOptimizer:
    inner = inner_optimizer(optimizer)
    keys = tuple(tuple(group["params"]) for group in entry["groups"])
    return _CachedOptimizer(weakref.ref(optimizer), _groups_of(inner), keys, _states_of(inner), dict(entry))


def _groups_of(inner: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, group["params"])) for group in inner.param_groups)


def _states_of(inner: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the names of all states, and the identities of those that are tensors."""
    return tuple(
        (id(param), *((name, _identity(value) if torch.is_tensor(value) else None) for name, value in state.items()))
        for param, state in inner.state.items()
    )
