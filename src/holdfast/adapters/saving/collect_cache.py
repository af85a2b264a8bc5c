"""Rosters: what a state was found to hold, found again quickly as long as nothing came or went.

A save looks at every tensor of modules and optimizers. From save to save they are the same
objects in the same memory, which is checked by identity; what is not a tensor is always read
anew. Keeps no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.adapters.live_state import LiveState, sort_state
from holdfast.adapters.loading.load_hooks import has_plain_state_dict
from holdfast.adapters.module import unwrap
from holdfast.adapters.optimizer import DeclaresShards, inner_optimizer
from holdfast.adapters.saving.collect import Collected, Offer, collect_values, model_files, option_groups, plan_of
from holdfast.adapters.tensors import Holder, Holders, has_memory, memory_of, without_grad
from holdfast.format import statejson
from holdfast.format.dtypes import DType

_PLAIN = ("state_dict", "_save_to_state_dict")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")


@dataclass(frozen=True, slots=True)
class _Seat:
    """One tensor: who it is, what its memory is, and the offer it makes."""

    tensor: weakref.ref[torch.Tensor]
    memory: tuple[Any, ...]
    offer: tuple[str, str, str, DType | None]
    layout: tuple[Any, ...]

    def offered(self) -> Offer | None:
        value: Any = self.tensor()
        if value is None:
            return None
        if not has_memory(value, self.memory):
            return None
        local = value if self.memory[-2] is None else value._local_tensor
        group, key, role, cast = self.offer
        logical, shape, parts, how = self.layout
        return Offer(group, key, role, Holder(logical, shape, parts, without_grad(local), how), cast, self.tensor)


@dataclass(frozen=True, slots=True)
class _KnownOptimizer:
    """An optimizer's parameters with their keys, the names of their states, and what of its entry stays."""

    optimizer: weakref.ref[Any]
    groups: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[str, ...], ...]
    states: tuple[tuple[Any, ...], ...]
    entry: Mapping[str, Any]

    def entry_now(self, optimizer: Any, name: str) -> dict[str, Any] | None:
        """Its entry with today's options and plain values; None if it has changed otherwise."""
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


class Roster:
    """Remembers one state; recalls what `collect` would find, or None if it has to look."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._modules: dict[str, Any] = {}
        self._optimizers: dict[str, _KnownOptimizer] = {}
        self._seats: list[_Seat] = []
        self._ties: list[tuple[weakref.ref[torch.Tensor], Any]] = []
        self._facts: Collected | None = None

    def learn(self, state: Mapping[str, Any], live: LiveState, collected: Collected) -> None:
        """Remember what was just collected, if it can be recognised again."""
        self._facts = None
        plain = all(_is_plain(view.module) and not view.extra for view in live.modules.values())
        for optimizer in live.optimizers.values():
            plain = plain and has_plain_state_dict(optimizer) and not isinstance(optimizer, DeclaresShards)
        seats = [_seat(offer) for offer in collected.offers[: collected.fixed]]
        if not plain or live.averages or any(seat is None for seat in seats):
            return
        self._names = list(state)
        self._modules = {name: _structure(state[name]) for name in live.modules}
        self._optimizers = {name: _known(state[name], collected.optimizers[name]) for name in live.optimizers}
        self._seats = [seat for seat in seats if seat is not None]
        # Tied tensors make no offer of their own; one that is untied has to be offered.
        ties = [view.tensors[alias] for view in live.modules.values() for alias in view.ties if alias in view.tensors]
        memories = [memory_of(tensor) for tensor in ties]
        if any(memory is None for memory in memories):
            return
        self._ties = [(weakref.ref(tensor), memory) for tensor, memory in zip(ties, memories, strict=True)]
        self._facts = Collected(
            kinds={n: kind for n, kind in collected.kinds.items() if n not in live.trees},
            aliases=dict(collected.aliases),
            owners=dict(collected.owners),
            files=dict.fromkeys(collected.files, b""),
        )

    def recall(self, state: Mapping[str, Any], holders: Holders, model_dtype: str | None) -> Collected | None:
        """The same as `collect` gives, if the tensors are those that are remembered."""
        facts = self._facts
        if facts is None or list(state) != self._names:
            return None
        if any(_structure(state[name]) != structure for name, structure in self._modules.items()):
            return None
        if any((tied := tensor()) is None or not has_memory(tied, memory) for tensor, memory in self._ties):
            return None
        offers = [seat.offered() for seat in self._seats]
        entries = {name: known.entry_now(state[name], name) for name, known in self._optimizers.items()}
        if None in offers or None in entries.values():
            return None
        out = Collected(
            offers=[offer for offer in offers if offer is not None],
            kinds=dict(facts.kinds),
            aliases=dict(facts.aliases),
            optimizers={name: entry for name, entry in entries.items() if entry is not None},
            owners=dict(facts.owners),
            live_optimizers=[state[name] for name in self._optimizers],
            holders=holders,
        )
        if facts.files:
            out.files |= model_files(unwrap(state["model"]), model_dtype)
        for name in self._modules:
            out.plans |= plan_of(name, unwrap(state[name]))
        known = self._modules.keys() | self._optimizers.keys()
        collect_values(out, sort_state({name: value for name, value in state.items() if name not in known}, {}))
        return out


def _seat(offer: Offer) -> _Seat | None:
    value = offer.source() if offer.source is not None else None
    if value is None:
        return None
    local = value._local_tensor if isinstance(value, DTensor) else value
    holder = offer.holder
    memory = memory_of(value)
    if memory is None or not memory[0] or memory[0] != holder.local.data_ptr() or local.dtype != holder.local.dtype:
        return None
    layout = (holder.logical, holder.shape, holder.parts, holder.how)
    return _Seat(weakref.ref(value), memory, (offer.group, offer.key, offer.role, offer.cast), layout)


def _is_plain(module: nn.Module) -> bool:
    """Whether its state_dict is its parameters and buffers: no override and no hook but torch's own."""
    for part in module.modules():
        own = vars(part)
        if any(name in own or getattr(type(part), name) is not getattr(nn.Module, name) for name in _PLAIN):
            return False
        hooks = [hook for name in _HOOKS for hook in getattr(part, name, {}).values()]
        if not all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks):
            return False
    return True


def _structure(module: Any) -> list[Any] | None:
    """The identities of a module's parts and tensors, with their names."""
    if not isinstance(module, nn.Module):
        return None
    out = []
    for part in module.modules():
        held = (part._modules, part._parameters, part._buffers)
        names = [name for members in held for name in members]
        members = [id(value) for parts in held for value in parts.values()]
        hooks = len(part._state_dict_hooks), len(part._state_dict_pre_hooks)
        out.append((weakref.ref(part), names, sorted(part._non_persistent_buffers_set), members, hooks))
    return out


def _known(optimizer: Any, entry: Mapping[str, Any]) -> _KnownOptimizer:
    inner = inner_optimizer(optimizer)
    keys = tuple(tuple(group["params"]) for group in entry["groups"])
    return _KnownOptimizer(weakref.ref(optimizer), _groups_of(inner), keys, _states_of(inner), dict(entry))


def _groups_of(inner: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, group["params"])) for group in inner.param_groups)


def _states_of(inner: Any) -> tuple[tuple[Any, ...], ...]:
    """Which states there are: the names of all, and the identities of tensors."""
    return tuple(
        (id(param), *((name, id(value) if isinstance(value, torch.Tensor) else None) for name, value in state.items()))
        for param, state in inner.state.items()
    )
