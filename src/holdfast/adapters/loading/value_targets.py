"""Load entries of state.json into averages, trees, stateful objects and plain values; reshard stateful objects."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.adapters.live_state import FollowsLive, LiveState, Reshards, ReshardsAt, Stateful
from holdfast.adapters.loading.optimizer_targets import Action
from holdfast.adapters.loading.schedulers import regroup
from holdfast.adapters.loading.subclass_requests import request_without_live
from holdfast.adapters.loading.tree_targets import (
    LiveLeaf,
    TreeAssembly,
    decode_references,
    has_plain_values,
    live_leaves,
    replaced_tensors,
)
from holdfast.adapters.loading.wants import LoadRequests
from holdfast.adapters.tree import decode_tensors, flatten, unflatten
from holdfast.core.errors import HoldfastError, LayoutError
from holdfast.layout.coordinates import coordinate_change, key_at, live_coordinate, own_value, parse_label
from holdfast.layout.placement import Mesh
from holdfast.plan.state_references import references

_KINDS = {"module": "module", "averages": "moving average"}


class StateEntries:
    """The entries of state.json, looked up for one rank; mismatches go to the findings of `requests`."""

    def __init__(self, live: LiveState, requests: LoadRequests, mesh: Mesh, rank: int, world: int) -> None:
        self._live = live
        self._requests = requests
        self._mesh = mesh
        self._rank = rank
        self._world = world

    def value(self, name: str) -> tuple[Any, str] | None:
        """Return this rank's value of an entry, and the suffix of its tensors' keys; None without a value."""
        contents, findings = self._requests.contents, self._requests.findings
        entry = contents.state.get(name)
        if entry is None:
            has = ", ".join(sorted({*contents.groups, *contents.state}))
            findings.missing.append(f"{name}: no such entry; the checkpoint has {has or 'nothing'}")
            return None
        kind = entry["kind"]
        if kind == "optimizer":
            findings.mismatched.append(f"{name}: saved as an optimizer, but the live value is not an optimizer")
            return None
        owners: dict[str, Mapping[str, Any]] = {"module": self._live.modules, "averages": self._live.averages}
        if kind in owners and name not in owners[kind]:
            findings.mismatched.append(f"{name}: saved as a {_KINDS[kind]}, but the live value is not a {_KINDS[kind]}")
            return None
        own = own_value(self._mesh, entry, self._rank, self._world)
        if own is not None:
            # The tensors of a tree are replicas under one key; those of objects are stored by coordinate.
            return own[0], "" if kind == "tensors" else own[1]
        if not isinstance(self._live.statefuls.get(name), Reshards | ReshardsAt):
            findings.mismatched.append(self._other_layout(name, entry))
        return None

    def _other_layout(self, name: str, entry: Mapping[str, Any]) -> str:
        """Return the finding for an entry whose value for this rank's coordinate was not saved."""
        saved = ", ".join(f"{axis}={size}" for axis, size in zip(entry["axes"], entry["sizes"], strict=True))
        live = ", ".join(f"{axis}={size}" for axis, size in zip(self._mesh.axes, self._mesh.sizes, strict=True))
        fix = "give the object a holdfast_reshard method"
        if name not in self._live.statefuls:
            fix = "replace it with an object that has state_dict, load_state_dict and holdfast_reshard"
        differs = f"{name}: its value differs along {saved}, but the live mesh is {live}"
        return f"{differs}; {fix}, or exclude it with ignore"

    def new_tensors(
        self, name: str, value: Any, suffix: str, like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Allocate and request a tensor for every reference in an encoded value.

        Returns None if any of them cannot be filled, so that no uninitialized memory is returned; the
        findings say why.
        """
        out = {}
        complete = True
        for key in references(value):
            stored = key_at(key, suffix)
            source = self._requests.contents.find(name, stored)
            if source is None:
                self._report_absent(name, stored)
                complete = False
                continue
            dtype = getattr(torch, source.logical)
            out[key] = torch.empty_like(like[key]) if key in like else torch.empty(source.logical_shape, dtype=dtype)
            complete = self._requests.request(name, stored, out[key], source) and complete
        return out if complete else None

    def _report_absent(self, name: str, key: str) -> None:
        subclasses = self._requests.subclasses(name)
        if key in subclasses.descriptions:
            why = "there is no live tensor to take its class from"
            request_without_live(self._requests, name, key, subclasses, why)
        else:
            self._requests.findings.missing.append(f"{name}: {key}")

    def reshard(self, name: str, target: Reshards | ReshardsAt, live: Any) -> Any:
        """Return the state that `target` makes for this rank from the states of all saved coordinates."""
        entry = self._requests.contents.state[name]
        values = entry["values"]
        states = {parse_label(text): self._read_state(name, value, text, live) for text, value in values.items()}
        if isinstance(target, ReshardsAt):
            coordinate = live_coordinate(self._mesh, tuple(entry["axes"]), self._rank)
            return target.holdfast_reshard_at(states, coordinate, coordinate_change(self._mesh, entry, self._world))
        return target.holdfast_reshard(states, self._rank, self._world)

    def _read_state(self, name: str, value: Any, suffix: str, live: Any) -> Any:
        """Read the state of another coordinate with its tensors, immediately: only resharding needs it."""
        read = self._requests.checkpoint.read
        tensors = {}
        for key in references(value):
            source = self._requests.contents.find(name, key_at(key, suffix))
            tensors[key] = _as_tensor(read(key_at(key, suffix), name), source.logical if source else "")
        return unflatten(value, tensors, name, live)


def _as_tensor(array: np.ndarray[Any, Any], logical: str) -> torch.Tensor:
    """Convert a stored array to a tensor of its logical dtype, including dtypes that numpy lacks."""
    if array.dtype.kind in "biufc":
        tensor = torch.from_numpy(array)
        return tensor.to(getattr(torch, logical)) if logical and array.dtype.kind == "c" else tensor
    return torch.from_numpy(array.view(f"u{array.dtype.itemsize}")).view(getattr(torch, array.dtype.name))


class ValueTargets:
    """Destinations of tensors inside values, and the actions that assign the loaded values.

    `loaded` names the entries whose values this rank loads; `trees_with_values` those trees that have
    values other than tensors.
    """

    def __init__(self, live: LiveState, requests: LoadRequests, entries: StateEntries, rank: int) -> None:
        self._live = live
        self._requests = requests
        self._entries = entries
        self.actions: list[Action] = []
        self.notes: list[str] = []
        self.loaded: list[str] = []
        self.trees_with_values: list[str] = []
        self.live_parts: dict[str, dict[str, str]] = {}  # of objects whose loaded state follows the live ones of ranks
        self._leaders: Mapping[str, Mapping[str, Sequence[int]]] = {}
        self._rank = rank

    def compare_live(self, parts: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
        """Note which ranks have equal live parts, given those of all ranks."""
        self._leaders = {
            name: {part: _leaders([of_rank.get(name, {}).get(part) for of_rank in parts]) for part in own}
            for name, own in self.live_parts.items()
        }

    def find(self, state: MutableMapping[str, Any]) -> None:
        for name in self._live.averages:
            self._find_averages(name)
        for name in self._live.trees:
            self._find_tree(name, state)
        for name in filter(self._requests.choice.selects_entry, self._live.statefuls):
            self._find_stateful(name)
        for name in filter(self._requests.choice.selects_entry, self._live.values):
            self._find_value(name, state)

    def _find_averages(self, name: str) -> None:
        value = self._live.averages[name]
        averages = value.holdfast_averages()
        for group, view in self._live.averages_views(name).items():
            for key in view.tensors:
                tensor = averages.get(view.module_key(key))
                if tensor is not None and self._requests.choice.selects(group, key):
                    self._requests.request(group, key, tensor)
        if self._requests.choice.selects_entry(name):
            entry = self._entries.value(name)
            if entry is not None:
                count = unflatten(entry[0], {}, name)
                self.loaded.append(name)
                self.actions.append(lambda: value.holdfast_resume(count))

    def _find_tree(self, name: str, state: MutableMapping[str, Any]) -> None:
        live = self._live.trees[name]
        choice, contents, findings = self._requests.choice, self._requests.contents, self._requests.findings
        encoded, leaves = live_leaves(name, live)
        chosen = [key for key in leaves if choice.selects(name, key)]
        for problem in (leaves[key].problem for key in chosen if leaves[key].problem):
            raise LayoutError(problem)
        filled = frozenset(key for key in chosen if self._requests.request(name, key, leaves[key].tensor))
        known = name in contents.state or name not in contents.groups
        entry = self._entries.value(name) if known and choice.selects_entry(name) else None
        # Without an entry only the tensors are loaded, and the result has the structure of the live tree.
        saved = decode_references(encoded if entry is None else entry[0], name)
        if entry is not None:
            self.loaded.append(name)
            self.notes += self._requests.compare_types(saved, live, name)
            self._note_kinds(name, entry[0], leaves)
            if has_plain_values(saved):
                self.trees_with_values.append(name)
            for key, value in replaced_tensors(saved, live):
                if choice.selects(name, key):
                    kind = type(value).__name__
                    findings.mismatched.append(
                        f"{name}: {key}: saved as a tensor or array, but the live value is {kind}"
                    )
                    findings.wanted.append(f"{name}: {key}")

        def assign() -> None:
            made = TreeAssembly(leaves, filled).run(saved, live)
            if made is not live:
                state[name] = made

        self.actions.append(assign)

    def _note_reshard(self, name: str, target: Stateful) -> None:
        if isinstance(target, ReshardsAt) and target.reshard_note:
            self.notes.append(f"{name}: {target.reshard_note}")

    def _note_kinds(self, name: str, saved: Any, leaves: Mapping[str, LiveLeaf]) -> None:
        """Note arrays that are live as tensors, and tensors that are live as arrays; the live kind is kept."""
        kinds = {"$array": "a numpy array", "$tensor": "a tensor"}
        for key, tag in references(saved).items():
            if key in leaves and leaves[key].tag != tag:
                self.notes.append(f"{name}: {key} was saved as {kinds[tag]} and is now {kinds[leaves[key].tag]}")

    def _find_stateful(self, name: str) -> None:
        target = self._live.statefuls[name]
        entry = self._entries.value(name)
        if isinstance(target, ReshardsAt):
            target.reshard_note = ""
        live = target.state_dict()  # once, and on every rank: it may be collective
        if entry is not None:
            value, suffix = entry
            tensors = self._entries.new_tensors(name, value, suffix, _dtensors(name, live))
            if tensors is None:
                return
            self.loaded.append(name)
            self.notes += self._requests.compare_types(decode_references(value, name), live, name)
            if isinstance(target, FollowsLive) and not suffix:
                self.live_parts[name] = target.holdfast_live_parts(live)

            def assign() -> None:
                loaded = unflatten(value, tensors, name, live)
                if isinstance(target, FollowsLive) and name in self._leaders:
                    loaded = target.holdfast_follow_live(loaded, self._leaders[name], self._rank)
                target.load_state_dict(regroup(target, loaded, self._live, self._requests.contents.state))
                self._note_reshard(name, target)

            self.actions.append(assign)
        elif isinstance(target, Reshards | ReshardsAt) and name in self._requests.contents.state:
            made = self._entries.reshard(name, target, live)
            self.loaded.append(name)

            def assign() -> None:
                target.load_state_dict(made)
                self._note_reshard(name, target)

            self.actions.append(assign)

    def _find_value(self, name: str, state: MutableMapping[str, Any]) -> None:
        entry = self._entries.value(name)
        if entry is not None:
            value, suffix = entry
            tensors = self._entries.new_tensors(name, value, suffix, {})
            if tensors is None:
                return
            self.loaded.append(name)
            saved = decode_tensors(value, tensors, name)
            self.notes += self._requests.compare_types(saved, state[name], name)

            def assign() -> None:
                # The program may hold a reference to a dict or list of the state, such as its position in the data.
                state[name] = TreeAssembly({}, frozenset()).run(saved, state[name])

            self.actions.append(assign)


def _leaders(digests: Sequence[str | None]) -> list[int]:
    """Return for each rank the first one with an equal digest."""
    first: dict[str | None, int] = {}
    return [first.setdefault(digest, rank) for rank, digest in enumerate(digests)]


def _dtensors(name: str, live: Any) -> dict[str, torch.Tensor]:
    """Return the sharded tensors in the state of an object, whose layout a load must follow."""
    try:
        tensors = flatten(name, live).tensors
    except HoldfastError:
        return {}  # the current state cannot be stored; the state to load can
    return {key: tensor for key, tensor in tensors.items() if isinstance(tensor, DTensor)}
