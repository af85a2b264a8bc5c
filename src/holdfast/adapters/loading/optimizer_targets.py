"""Load into optimizers: states, master weights, missing states created, options by parameter, kind mismatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from holdfast.adapters.hooks import (
    check_optimizer_load,
    has_optimizer_post_hooks,
    run_optimizer_post_hooks,
)
from holdfast.adapters.live_state import LiveState
from holdfast.adapters.live_types import with_live_types
from holdfast.adapters.loading.low_bit_casts import LowBitCasts
from holdfast.adapters.loading.subclass_requests import request_without_live
from holdfast.adapters.loading.wants import LoadRequests
from holdfast.adapters.low_bit_optimizers import initial_states
from holdfast.adapters.optimizer import (
    OptimizerView,
    assign_options,
    flatten_state,
    group_options,
    inner_optimizer,
    is_master,
    key_of_param,
    new_state,
    spanned_params,
    state_names,
    view_optimizer,
)
from holdfast.adapters.optimizer_options import decode_typed_options
from holdfast.adapters.tree import contains_tensor, decode_tensors
from holdfast.core.names import masters_group
from holdfast.plan.contents import StoredTensor
from holdfast.plan.state_references import references
from holdfast.plan.subclass_keys import StoredSubclasses

Action = Callable[[], object]
_NO_STATE = "the live optimizer has no such state yet, which could give its class: run a step first"
_ADDED = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"})


class OptimizerTargets:
    """One optimizer's destinations, and the actions to run once they are filled."""

    def __init__(self, name: str, optimizer: Any, live: LiveState, requests: LoadRequests) -> None:
        self._name = name
        self._optimizer = optimizer
        self._requests = requests
        self._module, self._key_of = live.parameter_keys(optimizer)
        self._entry: Mapping[str, Any] = requests.contents.state.get(name) or {}
        self._casts = LowBitCasts(name, inner_optimizer(optimizer), requests)
        self.actions: list[Action] = self._casts.actions
        self.notes: list[str] = []
        self.loads_options = False

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        """The stored states by "parameter key/state name"."""
        contents = self._requests.contents
        tensors = {key: contents.find(self._name, key) for key in contents.groups[self._name].tensors}
        return {key: tensor for key, tensor in tensors.items() if tensor is not None}

    @cached_property
    def _options(self) -> list[dict[str, Any]]:
        """The saved options of each group, decoded; classes are left open."""
        return [decode_typed_options(group["options"], self._name) for group in self._entry["groups"]]

    @cached_property
    def _subclasses(self) -> StoredSubclasses:
        return self._requests.subclasses(self._name)

    @property
    def _state_keys(self) -> list[str]:
        """The keys of the stored states; a tensor subclass is one state, whatever is inside."""
        plain = [key for key in self._stored if key not in self._subclasses.outer]
        return [*plain, *self._subclasses.descriptions]

    def find(self) -> None:
        view = view_optimizer(self._name, self._optimizer, self._key_of)
        if not self._entry or self._name not in self._requests.contents.groups:
            if self._requests.choice.selects_entry(self._name):
                self._requests.findings.missing.append(f"{self._name}: the checkpoint has no such optimizer")
            return
        mismatch = self._mismatch() if self._requests.choice.selects_entry(self._name) else ""
        if mismatch:
            self._requests.findings.mismatched.append(f"{self._name}: {mismatch}")
            return
        if not view.declared:
            self._check_load()
        if view.declared:
            self._find_declared(view)
        else:
            self._find_states(view)
        if self._requests.choice.selects(self._name, "param_groups"):
            if not any(self._options):
                self.notes.append(f"{self._name}: its param_groups were not saved; the live options stay")
            self._check_split()
            live = self._live_options()
            for saved in self._options:
                self.notes += self._requests.compare_types(saved, live, f"{self._name}.param_groups")
            self.actions.append(self._apply_options)
            self.loads_options = True
        if has_optimizer_post_hooks(self._optimizer):
            self.actions.append(partial(run_optimizer_post_hooks, self._optimizer))

    def _check_load(self) -> None:
        """Raise Unsupported for load_state_dict code that would be skipped, if anything is loaded."""
        labels = ("param_groups", *self._state_keys)
        if any(self._requests.choice.selects(self._name, label) for label in labels):
            check_optimizer_load(self._name, self._optimizer)

    def _mismatch(self) -> str:
        """Describe why nothing of the stored optimizer can be loaded; "" if it can."""
        kind = self._kind_mismatch()
        if kind:
            return f"saved by another kind of optimizer: {kind}"
        saved, live = self._entry.get("spans"), spanned_params(self._optimizer, self._key_of, self._name)
        if saved is not None and live is not None and saved != live:
            return "its state belongs to all parameters together, which were saved in another order or with other sizes"
        return ""

    def _kind_mismatch(self) -> str:
        """Describe how the stored optimizer differs in kind from the live one; "" if the kinds match.

        Compares state names if the live optimizer is torch's own, and option names. Versions of torch
        and schedulers add single options; only a different kind both lacks and adds several.
        """
        inner = inner_optimizer(self._optimizer)
        states = {key.rpartition("/")[2] for key in self._state_keys}
        foreign = sorted(states - state_names(inner)) if state_names(inner) else []
        if foreign:
            return f"{type(inner).__name__} has no state {', '.join(foreign[:4])}"
        live = set(getattr(inner, "defaults", ()))
        for stored in map(set, self._options if live else ()):
            lacking, strange = sorted(live - stored), sorted(stored - live - _ADDED)
            if len(lacking) > 1 and len(strange) > 1:
                return f"the stored optimizer has {', '.join(strange[:4])}, the live one {', '.join(lacking[:4])}"
        return ""

    def _find_declared(self, view: OptimizerView) -> None:
        for key, value in view.tensors:
            if self._requests.choice.selects(self._name, key):
                self._requests.request(self._name, key, value)
        for key, value in view.masters:
            self._requests.request_master(self._module, key, value)

    def _find_states(self, view: OptimizerView) -> None:
        by_param: dict[str, list[str]] = {}
        scalars = self._entry.get("scalars", {})
        nested = references(scalars)
        for stored_key in self._state_keys:
            if stored_key in nested:
                continue
            param_key, _, state_name = stored_key.rpartition("/")
            by_param.setdefault(param_key, []).append(state_name)
        stateless = set(self._entry.get("stateless", ()))
        group_of = {id(param): group for group in view.optimizer.param_groups for param in group["params"]}
        for key, param in view.params:
            live = dict(view.optimizer.state.get(param, {}))
            if key in stateless and not self._requests.choice.selects(self._name, f"{key}/*"):
                continue
            if key in stateless:
                self.actions.append(partial(view.optimizer.state.pop, param, None))
                continue
            if key not in by_param and key not in scalars and not self._has_master(key):
                self._report_missing(key, live)
                continue
            if not live and self._shape_differs(key, param, by_param.get(key, [])):
                continue
            options, encoded = group_of[id(param)], scalars.get(key, {})
            initial = {} if live else initial_states(view.optimizer, param, options)
            live = live or initial
            new = self._states_of(key, param, live, (*by_param.get(key, ()), *encoded), options)
            if new:
                new = {**initial, **new}
            new |= self._master_of(key, param, live)
            stale: list[str] = []
            chosen = {name: value for name, value in encoded.items() if self._selects_state(key, value)}
            tensors = self._nested_tensors(key, param, live, chosen, options) if chosen else {}
            if tensors is not None and (chosen or self._requests.choice.selects(self._name, f"{key}/*")):
                saved = decode_tensors(chosen, tensors, self._name)
                self.notes += self._requests.compare_types(saved, live, f"{self._name}[{key}]")
                plain = with_live_types(saved, live)
                if self._requests.choice.selects(self._name, f"{key}/*"):
                    stale = [n for n, value in live.items() if not isinstance(value, torch.Tensor) and n not in encoded]
                dropped = [n for n in stale if contains_tensor(live[n])]
                self.notes += [f"{self._name}: {key}/{n} was not saved, and is removed" for n in dropped]
                new |= plain
            self.actions.append(partial(_apply_state, view.optimizer, param, new, stale))

    def _report_missing(self, key: str, live: Mapping[str, Any]) -> None:
        """Report the live states of a parameter as missing, or "*" if it has none yet."""
        if self._requests.keeps(self._module, key):
            return
        for label in [f"{key}/{state_name}" for state_name in live] or [f"{key}/*"]:
            if self._requests.choice.selects(self._name, label):
                self._requests.findings.missing.append(f"{self._name}: {label}")

    def _states_of(
        self, key: str, param: torch.Tensor, live: Mapping[str, Any], stored: Sequence[str], options: dict[str, Any]
    ) -> dict[str, Any]:
        new: dict[str, Any] = {}
        for state_name in stored:
            label = f"{key}/{state_name}"
            source = self._stored.get(label)
            is_stored = source is not None or label in self._subclasses.descriptions
            if not is_stored or not self._requests.choice.selects(self._name, label):
                continue
            tensor: Any = live.get(state_name)
            if source is None and not isinstance(tensor, torch.Tensor):
                inner = inner_optimizer(self._optimizer)
                why = f"{type(inner).__name__} keeps it as a plain tensor" if state_names(inner) else _NO_STATE
                request_without_live(self._requests, self._name, label, self._subclasses, why)
                continue
            if source is not None and not isinstance(tensor, torch.Tensor):
                dtype = self._new_dtype(key, param, source)
                tensor = new_state(param, state_name, source.logical_shape, dtype, options)
            converted = self._casts.request(label, param, tensor)
            if self._requests.request(self._name, label, tensor, source) if converted is None else converted:
                new[state_name] = tensor
        for state_name, value in live.items():
            if isinstance(value, torch.Tensor) and state_name not in stored and not is_master(state_name):
                self._report_missing(key, {state_name: value})
        return new

    def _selects_state(self, key: str, encoded: Any) -> bool:
        """Return True if a state that is not a tensor is selected: by the keys of all tensors inside, if it has any."""
        labels = references(encoded) or (f"{key}/*",)
        return all(self._requests.choice.selects(self._name, label) for label in labels)

    def _nested_tensors(
        self, key: str, param: torch.Tensor, live: Mapping[str, Any], encoded: Any, options: dict[str, Any]
    ) -> dict[str, torch.Tensor] | None:
        """Allocate and request the tensors inside the states of a parameter; None if one of them cannot be filled."""
        nested = references(encoded)
        held: dict[str, torch.Tensor] = {}
        for state_name, value in live.items() if nested else ():
            if not isinstance(value, torch.Tensor) and contains_tensor(value):
                held |= flatten_state(self._name, key, state_name, value).tensors
        out: dict[str, torch.Tensor] = {}
        complete = True
        for label, tag in nested.items():
            source = self._stored.get(label)
            if source is None:
                self._requests.findings.missing.append(f"{self._name}: {label}")
                complete = False
                continue
            if label in held:
                out[label] = held[label]
            elif tag == "$array":
                out[label] = torch.empty(source.logical_shape, dtype=getattr(torch, source.logical))
            else:
                dtype = self._new_dtype(key, param, source)
                out[label] = new_state(param, label, source.logical_shape, dtype, options)
            complete = self._requests.request(self._name, label, out[label], source) and complete
        return out if complete else None

    def _new_dtype(self, key: str, param: torch.Tensor, source: StoredTensor) -> torch.dtype:
        """Return the dtype for a state that the optimizer has not created: the stored dtype, or a cast parameter's.

        A state stored in its parameter's dtype gets the live parameter's dtype, as after torch's own load.
        """
        owner = self._requests.contents.find(self._module, key)
        same = owner is not None and owner.logical == source.logical
        follows = same and ("spans" in self._entry or (owner is not None and source.shape == owner.shape))
        return param.dtype if self._requests.casts and follows else getattr(torch, source.logical)

    def _shape_differs(self, key: str, param: torch.Tensor, stored: Sequence[str]) -> bool:
        """Report stored states of a parameter whose shape differs; returns True if it does."""
        owner = self._requests.contents.find(self._module, key)
        if owner is None or owner.shape == tuple(param.shape):
            return False
        states = {label: self._stored[label] for name in stored if (label := f"{key}/{name}") in self._stored}
        for label in (f"{key}/{name}" for name in stored if f"{key}/{name}" in self._subclasses.descriptions):
            shapes = f"the parameter has shape {list(param.shape)}, stored {list(owner.shape)}"
            request_without_live(self._requests, self._name, label, self._subclasses, shapes)
        self._requests.findings.wanted += [f"{self._name}: {label}" for label in states]
        shapes = f"stored {list(owner.shape)}, live {list(param.shape)}"
        for label, state in states.items():
            if state.shape == owner.shape:
                self._requests.findings.mismatched.append(f"{self._name}: {label}: the shape differs: {shapes}")
        return True

    def _master_of(self, key: str, param: torch.Tensor, live: Mapping[str, Any]) -> dict[str, Any]:
        state_name = next((name for name in live if is_master(name)), None)
        if state_name is not None:
            tensor = live[state_name]
            return {state_name: tensor} if self._requests.request_master(self._module, key, tensor) else {}
        source = self._requests.contents.find(masters_group(self._module), key)
        if source is None or not self._has_master(key):
            return {}
        saved_name = str(self._entry["masters"])
        tensor = torch.empty_like(param, dtype=getattr(torch, source.dtype.name), requires_grad=False)
        return {saved_name: tensor} if self._requests.request_master(self._module, key, tensor) else {}

    def _has_master(self, key: str) -> bool:
        """Return True if the saved optimizer kept a master weight of this parameter."""
        source = self._requests.contents.find(masters_group(self._module), key)
        return bool(self._entry.get("masters")) and source is not None

    def _apply_options(self) -> None:
        self.notes += [f"{self._name}: {note}" for note in assign_options(self._optimizer, self._saved_options())]

    def _saved_options(self) -> dict[int, dict[str, Any]]:
        """Return the saved options of each live parameter, by identity; equal options are the same object."""
        by_text: dict[str, dict[str, Any]] = {}
        by_key: dict[str, dict[str, Any]] = {}
        types = self._live_options()
        for group, saved in zip(self._entry["groups"], self._options, strict=True):
            text = repr(group["options"])
            if text not in by_text:
                by_text[text] = dict(with_live_types(saved, types))
            by_key |= dict.fromkeys(group["params"], by_text[text])
        live = [param for params, _ in group_options(self._optimizer) for param in params]
        keys = {id(param): key_of_param(self._name, param, self._key_of) for param in live}
        return {identity: by_key[key] for identity, key in keys.items() if key in by_key}

    def _live_options(self) -> dict[str, Any]:
        """Return the live options of all groups, one value of each, for their classes."""
        return {name: value for _, options in group_options(self._optimizer) for name, value in options.items()}

    def _check_split(self) -> None:
        """Report groups that ZeroRedundancyOptimizer cannot split: it partitions its groups when constructed."""
        if inner_optimizer(self._optimizer) is self._optimizer:
            return
        saved = self._saved_options()
        for index, (params, _) in enumerate(group_options(self._optimizer)):
            if len({id(saved[id(param)]) for param in params if id(param) in saved}) > 1:
                self._requests.findings.mismatched.append(
                    f"{self._name}: the parameters of group {index} were saved with different options, and "
                    "ZeroRedundancyOptimizer cannot split a group; create it with the groups it was saved with"
                )


def _apply_state(optimizer: Any, param: torch.Tensor, new: dict[str, Any], stale: Sequence[str]) -> None:
    """Merge loaded states into the live state and drop the `stale` scalars that were not saved."""
    if new or stale:
        kept = {name: value for name, value in optimizer.state.get(param, {}).items() if name not in stale}
        optimizer.state[param] = {**kept, **new}
