"""Loading: where each stored tensor goes in the live state, and what is done once all are in.

Targets are found before anything is touched, so that every missing key, shape and dtype is
known at once.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.adapters.coordinates import axis_sizes, coordinate_on, key_at, label, parse_label
from holdfast.adapters.entries import LiveState, Reshards, masters_group
from holdfast.adapters.module import set_extra_state
from holdfast.adapters.offers import decode_options
from holdfast.adapters.optimizer import (
    OptimizerView,
    StateTensor,
    assign_options,
    group_options,
    key_of_param,
    new_state,
    view_optimizer,
)
from holdfast.adapters.tensors import Holder, holder_of, part_view, raw_array
from holdfast.adapters.tree import flatten, references, unflatten
from holdfast.core.errors import HoldfastError, Mismatch
from holdfast.format import statejson
from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.layout.mesh import Mesh
from holdfast.layout.placement import Part
from holdfast.plan.arrays import RawArray
from holdfast.adapters.stored import StoredState
from holdfast.plan.files import Place


@dataclass(frozen=True, slots=True)
class Choice:
    """Which keys are loaded: all, or those that patterns name. A pattern fits a key or "group/key"."""

    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def takes(self, group: str, key: str) -> bool:
        labels = (key, f"{group}/{key}")
        if any(fnmatch.fnmatchcase(text, pattern) for pattern in self.ignore for text in labels):
            return False
        return not self.only or any(fnmatch.fnmatchcase(text, pattern) for pattern in self.only for text in labels)


@dataclass(slots=True)
class Findings:
    """What does not fit, on this rank; texts, so that ranks can gather them."""

    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)


class TensorDestination:
    """A part of a live tensor that a load fills."""

    def __init__(self, holder: Holder, part: Part, stored: str) -> None:
        self._view = part_view(holder, part)
        self._stored: torch.dtype = getattr(torch, stored)

    def direct(self) -> RawArray | None:
        if self._view.device.type != "cpu" or self._view.dtype != self._stored:
            return None
        return raw_array(self._view)

    def put(self, part: Box, data: RawArray) -> None:
        array = self.direct()
        if array is not None:
            array[(*part.within(Box.full(array.shape)), ...)] = data
            return
        values = torch.from_numpy(np.ascontiguousarray(data).view("u1")) if data.size else torch.empty(0, dtype=torch.uint8)
        source = values.reshape(-1).view(self._stored).reshape(part.sizes)
        self._view[(*part.within(Box.full(tuple(self._view.shape))), ...)].copy_(source)


class Targets:
    """The destinations of one rank, and the actions that follow the reading."""

    def __init__(self, checkpoint: StoredState, live: LiveState, choice: Choice, *, cast: bool, mesh: Mesh, rank: int, world: int) -> None:
        self.checkpoint = checkpoint
        self.live = live
        self.findings = Findings()
        self.destinations: dict[tuple[Place, Box], list[TensorDestination]] = {}
        self.notes: list[str] = []
        self._choice = choice
        self._cast = cast
        self._mesh = mesh
        self._rank = rank
        self._world = world
        self._finish: list[Callable[[], None]] = []

    def find(self, state: MutableMapping[str, Any]) -> None:
        """Look for everything the live state needs. Touches nothing."""
        for name in self.live.modules:
            self._find_module(name)
        for name, optimizer in self.live.optimizers.items():
            self._find_optimizer(name, optimizer)
        for name in self.live.trees:
            self._find_tree(name, state)
        for name in self.live.statefuls:
            self._find_stateful(name)
        for name in self.live.values:
            self._find_value(name, state)

    def finish(self) -> None:
        """Once all tensors are in: hand over what is not filled in place."""
        for action in self._finish:
            action()

    def unexpected(self, wanted: set[str]) -> list[str]:
        """Stored keys of the groups in the state that no rank wants."""
        chosen = [*self.live.modules, *self.live.optimizers, *self.live.trees]
        out = []
        for group in chosen:
            for key in self.checkpoint.places.get(group, {}):
                if f"{group}: {key}" not in wanted and self._choice.takes(group, key):
                    out.append(f"{group}: {key}")
        return out

    def _place(self, group: str, key: str) -> Place | None:
        record = self.checkpoint.manifest.groups.get(group)
        if record is None:
            return None
        return self.checkpoint.places[group].get(record.aliases.get(key, key))

    def _want(self, group: str, key: str, place: Place, value: StateTensor) -> bool:
        """Add a destination, or a finding if it does not fit."""
        text = f"{group}: {key}"
        self.findings.wanted.append(f"{group}: {place.spec.key}")
        holder = holder_of(value, text)
        stored, live = self.checkpoint.logical_dtype(group, place), holder.logical.name
        if holder.shape != place.spec.shape:
            shapes = f"stored {list(place.spec.shape)}, live {list(holder.shape)}"
            self.findings.mismatched.append(f"{text}: shape differs: {shapes}")
            return False
        if stored != live:
            plain = dtype_named(stored).name == dtype_named(stored).stored and live == holder.stored.name
            if not self._cast or not plain:
                hint = "" if self._cast else "; pass cast=True to convert"
                self.findings.mismatched.append(f"{text}: dtype differs: stored {stored}, live {live}{hint}")
                return False
            self.findings.cast.append(f"{text}: {stored} to {live}")
        for part in holder.parts:
            if part.box.volume:
                found = self.destinations.setdefault((place, part.box), [])
                found.append(TensorDestination(holder, part, place.spec.dtype.name))
        return True

    def _find_module(self, name: str) -> None:
        view = self.live.modules[name]
        seen: set[tuple[str, int]] = set()
        for key, tensor in view.tensors.items():
            stored = view.stored_key(key)
            if not self._choice.takes(name, stored) or (stored, id(tensor)) in seen:
                continue
            seen.add((stored, id(tensor)))
            place = self._place(name, stored) or self._place(name, key)
            if place is None:
                self.findings.missing.append(f"{name}: {key}")
                continue
            master = self._place(masters_group(name), stored)
            live = str(tensor.dtype).removeprefix("torch.")
            if master is not None and live == master.spec.dtype.name != place.spec.dtype.name:
                self.findings.wanted.append(f"{name}: {place.spec.key}")
                self._want(masters_group(name), stored, master, tensor)
            else:
                self._want(name, key, place, tensor)
        if view.extra:
            self._find_extra(name)

    def _find_extra(self, name: str) -> None:
        found = self._entry_value(name, None)
        if found is None:
            self.findings.missing += [f"{name}: {key}" for key in self.live.modules[name].extra]
            return
        value, suffix = found
        tensors = self._new_tensors(name, value, suffix, {})

        def give() -> None:
            for key, extra in unflatten(value, tensors, name).items():
                set_extra_state(self.live.modules[name], key, extra)

        self._finish.append(give)

    def _find_optimizer(self, name: str, optimizer: Any) -> None:
        module, key_of = self.live.parameter_keys(optimizer)
        view = view_optimizer(name, optimizer, key_of)
        entry = self.checkpoint.state.get(name)
        if entry is None or name not in self.checkpoint.manifest.groups:
            if self._choice.takes(name, name) and not self._choice.only:
                self.findings.missing.append(f"{name}: the checkpoint has no such optimizer")
            return
        if view.declared:
            self._find_declared(name, module, view)
        else:
            self._find_states(name, module, view, entry)
        if self._choice.takes(name, "param_groups"):
            self._finish.append(lambda: self._give_options(name, optimizer, key_of, entry))

    def _find_declared(self, name: str, module: str, view: OptimizerView) -> None:
        for key, value in view.tensors.items():
            if self._choice.takes(name, key):
                self._want_or_miss(name, key, self._place(name, key), value)
        for key, value in view.masters.items():
            if self._choice.takes(masters_group(module), key):
                self._want_master(module, key, value)

    def _want_or_miss(self, group: str, key: str, place: Place | None, value: StateTensor) -> None:
        if place is None:
            self.findings.missing.append(f"{group}: {key}")
        else:
            self._want(group, key, place, value)

    def _want_master(self, module: str, key: str, value: StateTensor) -> None:
        """Masters come from their own group, or from a model that was stored as wide as they are."""
        place = self._place(masters_group(module), key)
        if place is not None:
            self._want(masters_group(module), key, place, value)
            return
        self._want_or_miss(module, key, self._place(module, key), value)

    def _find_states(self, name: str, module: str, view: OptimizerView, entry: Mapping[str, Any]) -> None:
        by_param: dict[str, list[str]] = {}
        for key in self.checkpoint.places[name]:
            param, _, state_name = key.rpartition("/")
            by_param.setdefault(param, []).append(state_name)
        stateless = set(entry.get("stateless", ()))
        options = {id(p): group for group in view.optimizer.param_groups for p in group["params"]}
        for key, param in view.params.items():
            live = dict(view.optimizer.state.get(param, {}))
            stored = by_param.get(key, [])
            scalars = entry.get("scalars", {}).get(key)
            if not stored and scalars is None and key not in stateless:
                missing = [f"{key}/{state_name}" for state_name in live] or [f"{key}/*"]
                self.findings.missing += [f"{name}: {text}" for text in missing if self._choice.takes(name, text)]
                continue
            new = self._states_of(name, key, param, live, stored, options[id(param)])
            if entry.get("masters") and self._place(masters_group(module), key) is not None:
                self._master_state(module, key, param, live, new)
            if scalars is not None and self._choice.takes(name, f"{key}/*"):
                new |= statejson.decode(scalars, name)
            self._finish.append(self._setter(view.optimizer, param, new, drop=key in stateless))

    def _states_of(
        self,
        name: str,
        key: str,
        param: torch.Tensor,
        live: Mapping[str, Any],
        stored: Sequence[str],
        options: dict[str, Any],
    ) -> dict[str, Any]:
        new: dict[str, Any] = {}
        for state_name in stored:
            full = f"{key}/{state_name}"
            if not self._choice.takes(name, full):
                continue
            place = self.checkpoint.places[name][full]
            tensor = live.get(state_name)
            if not isinstance(tensor, torch.Tensor):
                dtype = getattr(torch, self.checkpoint.logical_dtype(name, place))
                tensor = new_state(param, state_name, self.checkpoint.logical_shape(name, place), dtype, options)
            if self._want(name, full, place, tensor):
                new[state_name] = tensor
        for state_name, value in live.items():
            known = state_name in stored or not isinstance(value, torch.Tensor) or _is_master(state_name)
            if not known and self._choice.takes(name, f"{key}/{state_name}"):
                self.findings.missing.append(f"{name}: {key}/{state_name}")
        return new

    def _master_state(
        self, module: str, key: str, param: torch.Tensor, live: Mapping[str, Any], new: dict[str, Any]
    ) -> None:
        place = self._place(masters_group(module), key)
        if place is None or not self._choice.takes(masters_group(module), key):
            return
        state_name = next((state for state in live if _is_master(state)), "master_param")
        tensor = live.get(state_name)
        if tensor is None:
            tensor = torch.empty_like(param, dtype=getattr(torch, place.spec.dtype.name), requires_grad=False)
        if self._want(masters_group(module), key, place, tensor):
            new[state_name] = tensor

    def _setter(self, optimizer: Any, param: torch.Tensor, new: dict[str, Any], *, drop: bool) -> Callable[[], None]:
        def give() -> None:
            if drop:
                optimizer.state.pop(param, None)
            elif new:
                optimizer.state[param] = {**optimizer.state.get(param, {}), **new}

        return give

    def _give_options(self, name: str, optimizer: Any, key_of: Mapping[int, str], entry: Mapping[str, Any]) -> None:
        by_key: dict[str, dict[str, Any]] = {}
        for group in entry["groups"]:
            options = decode_options(group["options"], name)
            by_key |= dict.fromkeys(group["params"], options)
        options_of = {}
        for params, _ in group_options(optimizer):
            for param in params:
                key = key_of_param(name, param, key_of)
                if key in by_key:
                    options_of[id(param)] = by_key[key]
        self.notes += [f"{name}: {note}" for note in assign_options(optimizer, options_of)]

    def _find_tree(self, name: str, state: MutableMapping[str, Any]) -> None:
        value = self.live.trees[name]
        tensors = flatten(name, value).tensors
        for key, tensor in tensors.items():
            if self._choice.takes(name, key):
                self._want_or_miss(name, key, self._place(name, key), tensor)
        found = self._entry_value(name, None) if self._choice.takes(name, name) or not self._choice.only else None
        if found is None or not isinstance(value, dict):
            return

        def give() -> None:
            kept = {key: tensor for key, tensor in tensors.items()}
            loaded = unflatten(found[0], _OrStored(kept), name)
            value.clear()
            value.update(loaded)

        if set(references(found[0])) <= set(tensors):
            self._finish.append(give)

    def _find_stateful(self, name: str) -> None:
        if not self._choice.takes(name, name):
            return
        target = self.live.statefuls[name]
        found = self._entry_value(name, target)
        if found is None:
            return
        value, suffix = found
        if suffix is None:  # resharded: the value is ready as it is
            self._finish.append(lambda: target.load_state_dict(value))
            return
        tensors = self._new_tensors(name, value, suffix, _dtensors(name, target))
        self._finish.append(lambda: target.load_state_dict(unflatten(value, tensors, name)))

    def _new_tensors(
        self, name: str, value: Any, suffix: str, like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Fresh tensors for everything an encoded value refers to, as destinations."""
        out = {}
        for key in references(value):
            place = self._place(name, key_at(key, suffix))
            if place is None:
                self.findings.missing.append(f"{name}: {key_at(key, suffix)}")
                continue
            dtype = getattr(torch, self.checkpoint.logical_dtype(name, place))
            shape = self.checkpoint.logical_shape(name, place)
            out[key] = torch.empty_like(like[key]) if key in like else torch.empty(shape, dtype=dtype)
            self._want(name, key_at(key, suffix), place, out[key])
        return out

    def _find_value(self, name: str, state: MutableMapping[str, Any]) -> None:
        if not self._choice.takes(name, name):
            return
        found = self._entry_value(name, None)
        if found is not None:
            decoded = statejson.decode(found[0], name)
            self._finish.append(lambda: state.__setitem__(name, decoded))

    def _entry_value(self, name: str, target: Any) -> tuple[Any, str | None] | None:
        """This rank's value of a state.json entry and the suffix of its tensors' keys.

        The suffix is None for a value that the target itself made for the new mesh.
        """
        entry = self.checkpoint.state.get(name)
        if entry is None:
            self.findings.missing.append(f"{name}: not in {self.checkpoint.path}")
            return None
        if "value" in entry:
            return entry["value"], ""
        axes, sizes = tuple(entry["axes"]), tuple(entry["sizes"])
        coordinate = coordinate_on(self._mesh, axes, self._rank)
        if coordinate is not None and axis_sizes(self._mesh, axes, self._world) == sizes:
            text = label(axes, coordinate)
            if text in entry["values"]:
                return entry["values"][text], text
        if isinstance(target, Reshards):
            states = {parse_label(text): self._whole(name, value, text) for text, value in entry["values"].items()}
            return target.holdfast_reshard(states, self._rank, self._world), None
        saved = ", ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
        live = ", ".join(f"{axis}={size}" for axis, size in zip(self._mesh.axes, self._mesh.sizes, strict=True))
        self.findings.mismatched.append(
            f"{name}: its value differs along {saved} and the live mesh is {live}; give the object a "
            "holdfast_reshard method, or leave it out with ignore"
        )
        return None

    def _whole(self, name: str, value: Any, suffix: str) -> Any:
        """Another coordinate's state, tensors included, read at once: only resharding needs it."""
        tensors = {}
        for key in references(value):
            array = self.checkpoint.read(key_at(key, suffix), name)
            tensors[key] = torch.from_numpy(array)
        return unflatten(value, tensors, name)


class _OrStored(dict[str, torch.Tensor]):
    """Tensors by key, for `unflatten`."""


def _is_master(state_name: str) -> bool:
    return state_name in ("master", "master_param", "master_weight", "master_weights")


def _dtensors(name: str, target: Any) -> dict[str, torch.Tensor]:
    """The sharded tensors of a stateful object, whose layout a load must follow."""
    try:
        found = flatten(name, target.state_dict()).tensors
    except HoldfastError:
        return {}
    return {key: tensor for key, tensor in found.items() if isinstance(tensor, DTensor)}


def describe_wants(targets: Targets, group_of: Mapping[str, str]) -> Iterator[list[Any]]:
    """What this rank wants, as ranks tell each other: group, key and boxes."""
    by_place: dict[Place, list[list[int]]] = {}
    for place, box in targets.destinations:
        by_place.setdefault(place, []).append([*box.offsets, *box.sizes])
    for place, boxes in by_place.items():
        yield [group_of[place.file], place.spec.key, boxes]


def raise_mismatch(findings: Sequence[str], path: str) -> None:
    """One error that lists everything that does not fit."""
    shown = findings[:200]
    more = f"\n  ... and {len(findings) - len(shown)} more" if len(findings) > len(shown) else ""
    raise Mismatch(
        f"{path} does not fit the live state; nothing was loaded:\n  "
        + "\n  ".join(shown)
        + more
        + "\npass strict=False to load what fits, or only=/ignore= to choose"
    )
