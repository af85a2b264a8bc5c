"""Loading: find where everything goes in the live state, then hand over what is not filled in place.

All targets are found before anything is touched, so that every missing key, shape and dtype
is known at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.adapters.live_state import LiveState, Reshards
from holdfast.adapters.loading.load_hooks import check_module, has_post_hooks, run_post_hooks
from holdfast.adapters.loading.numbered_optimizers import name_numbered
from holdfast.adapters.loading.optimizer_targets import Action, OptimizerTargets
from holdfast.adapters.loading.schedulers import regroup
from holdfast.adapters.loading.tree_targets import (
    Assembly,
    Leaf,
    decoded,
    has_plain_values,
    live_leaves,
    not_tensors_now,
)
from holdfast.adapters.loading.wants import Wants
from holdfast.adapters.module import is_below, non_persistent_buffers, set_extra_state
from holdfast.adapters.tree import flatten, unflatten
from holdfast.core.errors import HoldfastError, LayoutError, Mismatch, Unsupported
from holdfast.layout.coordinates import axis_sizes, coordinate_on, key_at, label, parse_label
from holdfast.layout.mesh import Mesh
from holdfast.plan.files import Place
from holdfast.plan.state_references import references

_KINDS = {"module": "module", "averages": "moving average"}


@dataclass(frozen=True, slots=True)
class Incompatible:
    """What does not fit, as post-hooks of modules are told and may change it."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class Targets:
    """Everything one rank's live state takes from a checkpoint."""

    def __init__(self, live: LiveState, wants: Wants, mesh: Mesh, rank: int, world: int) -> None:
        self.live = live
        self.wants = wants
        self._mesh = mesh
        self._rank = rank
        self._world = world
        self._actions: list[Action] = []
        self._optimizers: list[OptimizerTargets] = []
        self._notes: list[str] = []
        self._trees_with_values: list[str] = []
        self._shared = False
        self.not_stored: list[str] = []  # buffers that no checkpoint holds
        self.incompatible = Incompatible()
        self.given: list[str] = []  # entries of which this rank takes values that are not tensors

    def find(self, state: MutableMapping[str, Any]) -> None:
        """Look for everything the live state needs. Touches nothing."""
        named = name_numbered(self.wants.contents, self.live)
        self.wants.contents = named.contents
        self._notes += named.notes
        for name in self.live.modules:
            self._find_module(name)
        for name, optimizer in self.live.optimizers.items():
            if name in named.problems:
                if self.wants.choice.selects_entry(name):
                    self.wants.findings.mismatched.append(named.problems[name])
                continue
            targets = OptimizerTargets(name, optimizer, self.live, self.wants)
            targets.find()
            self._actions += targets.actions
            self._optimizers.append(targets)
        for name in self.live.averages:
            self._find_averages(name)
        for name in self.live.trees:
            self._find_tree(name, state)
        for name in filter(self.wants.choice.selects_entry, self.live.statefuls):
            self._find_stateful(name)
        for name in filter(self.wants.choice.selects_entry, self.live.values):
            self._find_value(name, state)
        self._shared = self.wants.set_shared_aside()

    @property
    def has_actions(self) -> bool:
        return self._shared or bool(self._actions)

    def count_given(self) -> int:
        """How many entries have values other than tensors that this rank takes."""
        return len(set(self.given)) + sum(targets.gives_options for targets in self._optimizers)

    @property
    def values(self) -> int:
        """How many values that are not tensors this rank takes."""
        kinds = {*self.live.averages, *self.live.statefuls, *self.live.values, *self._trees_with_values}
        return len(kinds & set(self.given))

    def finish(self, incompatible: Incompatible) -> dict[str, list[str]]:
        """Once all tensors are in: hand over what is not filled in place.

        Returns what is worth knowing, and what does not fit as hooks of the modules left it.
        """
        self.incompatible = incompatible
        self.wants.settle_shared()
        for action in self._actions:
            action()
        notes = [*self._notes, *(note for targets in self._optimizers for note in targets.notes)]
        return {"missing": incompatible.missing, "unexpected": incompatible.unexpected, "notes": notes}

    @property
    def groups(self) -> list[str]:
        """The groups of tensors that this rank's state names."""
        averages = [self.live.averages_group(name) for name in self.live.averages]
        return [*self.live.modules, *self.live.optimizers, *averages, *self.live.trees]

    def unexpected(self, wanted: set[str], groups: Iterable[str]) -> list[str]:
        """Stored keys of the groups in any rank's state that no rank wants."""
        out = []
        for group in groups:
            for key in self._stored_extras(group):
                if f"{group}: {key}" not in wanted and self.wants.choice.selects(group, key):
                    out.append(f"{group}: {key}")
            stored = self.wants.contents.groups.get(group)
            if stored is None:
                continue
            aliases: dict[str, list[str]] = {}
            for alias, key in stored.aliases.items():
                aliases.setdefault(key, []).append(alias)
            for key in stored.tensors:
                if f"{group}: {key}" not in wanted and self.wants.choice.selects(group, key, *aliases.get(key, ())):
                    out.append(f"{group}: {key}")
        return out

    def _stored_extras(self, group: str) -> list[str]:
        """The keys of the extra states that a module was saved with, on any rank."""
        entry = self.wants.contents.state.get(group, {})
        if entry.get("kind") != "module":
            return []
        values = [entry["value"]] if "value" in entry else list(entry["values"].values())
        return sorted({key for value in values if isinstance(value, dict) for key in value})

    def describe(self) -> Iterator[list[Any]]:
        """What this rank wants, as ranks tell each other: file, key in the file, and boxes."""
        by_place: dict[Place, list[list[int]]] = {}
        for place, box in self.wants.destinations:
            by_place.setdefault(place, []).append([*box.offsets, *box.sizes])
        for place, boxes in by_place.items():
            yield [place.file, place.spec.key, boxes]

    def _find_module(self, name: str) -> None:
        view = self.live.modules[name]
        seen: set[tuple[str, int]] = set()
        taken: list[str] = []
        for key, tensor in view.tensors.items():
            stored = view.stored_key(key)
            chosen = self.wants.choice.selects(name, stored, *view.aliases_of(stored))
            if chosen and key != stored:
                self.wants.findings.wanted.append(f"{name}: {key}")  # other tools store tied weights twice
            if chosen:
                taken.append(key)
            if not chosen or (stored, id(tensor)) in seen:
                continue
            if key in view.copies:
                raise Unsupported(
                    f"{name}: {key} in the module's state_dict is a copy, so that a load could not reach the module; "
                    "leave it out with ignore, and load it by hand"
                )
            seen.add((stored, id(tensor)))
            self.wants.want_parameter(name, key, stored, tensor)
        self._find_untied(name, taken)
        extras = [key for key in view.extra if self.wants.choice.selects(name, key)]
        self.wants.findings.wanted += [f"{name}: {key}" for key in extras]
        if extras:
            self._find_extra(name, extras)
        taken += extras
        if taken:
            check_module(name, view.outer, view.module, partial(_takes_below, taken, (*view.tensors, *view.extra)))
            self.not_stored += [f"{name}: {key}" for key in non_persistent_buffers(view)]
        if taken and has_post_hooks(view.outer):
            self._actions.append(partial(self._run_post_hooks, name))

    def _find_untied(self, name: str, taken: Sequence[str]) -> None:
        """Want what is stored apart for tensors that are tied now: one memory takes both only if they are equal."""
        view, contents = self.live.modules[name], self.wants.contents
        for key, stored in ((key, view.stored_key(key)) for key in taken):
            if key == stored:
                continue
            own, kept = contents.find(name, key), contents.find(name, stored)
            if own is not None and kept is not None and own.key != kept.key:
                self.wants.want_parameter(name, key, key, view.tensors[key])

    def _run_post_hooks(self, name: str) -> None:
        """Run the module's hooks as torch does after a load; they may change what counts as missing."""
        mark = f"{name}: "
        kinds = [self.incompatible.missing, self.incompatible.unexpected]
        own = [[text.removeprefix(mark) for text in texts if text.startswith(mark)] for texts in kinds]
        for texts, keys in zip(kinds, run_post_hooks(self.live.modules[name].outer, *own), strict=True):
            texts[:] = [text for text in texts if not text.startswith(mark)] + [mark + key for key in keys]

    def _find_extra(self, name: str, extras: Sequence[str]) -> None:
        if name not in self.wants.contents.state:
            self.wants.findings.missing += [f"{name}: {key}" for key in extras]
            return
        found = self._entry_value(name)
        if found is None:
            return
        value, suffix = {key: item for key, item in found[0].items() if key in extras}, found[1]
        self.wants.findings.missing += [f"{name}: {key}" for key in extras if key not in value]
        tensors = self._new_tensors(name, value, suffix, {})
        if tensors is None or not value:
            return
        self.given.append(name)

        def give() -> None:
            for key, extra in unflatten(value, tensors, name).items():
                set_extra_state(self.live.modules[name], key, extra)

        self._actions.append(give)

    def _find_averages(self, name: str) -> None:
        value, group = self.live.averages[name], self.live.averages_group(name)
        for key, tensor in value.holdfast_averages().items():
            if self.wants.choice.selects(group, key):
                self.wants.want(group, key, tensor)
        if self.wants.choice.selects_entry(name):
            found = self._entry_value(name)
            if found is not None:
                count = unflatten(found[0], {}, name)
                self.given.append(name)
                self._actions.append(lambda: value.holdfast_resume(count))

    def _find_tree(self, name: str, state: MutableMapping[str, Any]) -> None:
        live = self.live.trees[name]
        encoded, leaves = live_leaves(name, live)
        chosen = [key for key in leaves if self.wants.choice.selects(name, key)]
        for problem in (leaves[key].problem for key in chosen if leaves[key].problem):
            raise LayoutError(problem)
        filled = frozenset(key for key in chosen if self.wants.want(name, key, leaves[key].tensor))
        known = name in self.wants.contents.state or name not in self.wants.contents.groups
        found = self._entry_value(name) if known and self.wants.choice.selects_entry(name) else None
        # Without an entry only the tensors are loaded: the live tree is the shape of the result.
        saved = decoded(encoded if found is None else found[0], name)
        if found is not None:
            self.given.append(name)
            self._note_kinds(name, found[0], leaves)
            if has_plain_values(saved):
                self._trees_with_values.append(name)
            for key, value in not_tensors_now(saved, live):
                if self.wants.choice.selects(name, key):
                    text = f"{name}: {key}: it was saved as a tensor or array, and is {type(value).__name__} now"
                    self.wants.findings.mismatched.append(text)
                    self.wants.findings.wanted.append(f"{name}: {key}")

        def give() -> None:
            made = Assembly(leaves, filled).run(saved, live)
            if made is not live:
                state[name] = made

        self._actions.append(give)

    def _note_kinds(self, name: str, saved: Any, leaves: Mapping[str, Leaf]) -> None:
        """Report arrays that were saved and are live as tensors, and the other way round: the live kind stays."""
        kinds = {"$array": "a numpy array", "$tensor": "a tensor"}
        for key, tag in references(saved).items():
            if key in leaves and leaves[key].tag != tag:
                self._notes.append(f"{name}: {key} was saved as {kinds[tag]} and is {kinds[leaves[key].tag]} now")

    def _find_stateful(self, name: str) -> None:
        target = self.live.statefuls[name]
        found = self._entry_value(name)
        if found is not None:
            value, suffix = found
            tensors = self._new_tensors(name, value, suffix, _dtensors(name, target))
            if tensors is None:
                return
            self.given.append(name)

            def give() -> None:
                loaded = unflatten(value, tensors, name)
                target.load_state_dict(regroup(target, loaded, self.live, self.wants.contents.state))

            self._actions.append(give)
        elif isinstance(target, Reshards) and name in self.wants.contents.state:
            values = self.wants.contents.state[name]["values"]
            states = {parse_label(text): self._whole(name, value, text) for text, value in values.items()}
            made = target.holdfast_reshard(states, self._rank, self._world)
            self.given.append(name)
            self._actions.append(lambda: target.load_state_dict(made))

    def _find_value(self, name: str, state: MutableMapping[str, Any]) -> None:
        found = self._entry_value(name)
        if found is not None:
            value, suffix = found
            tensors = self._new_tensors(name, value, suffix, {})
            if tensors is None:
                return
            self.given.append(name)

            def give() -> None:
                # The program may hold on to a dict or list of its own, such as its position in the data.
                state[name] = Assembly({}, frozenset()).run(unflatten(value, tensors, name), state[name])

            self._actions.append(give)

    def _entry_value(self, name: str) -> tuple[Any, str] | None:
        """This rank's value of a state.json entry and the suffix of its tensors' keys."""
        contents = self.wants.contents
        entry = contents.state.get(name)
        if entry is None:
            has = ", ".join(sorted({*contents.groups, *contents.state}))
            self.wants.findings.missing.append(f"{name}: no such entry; the checkpoint has {has or 'nothing'}")
            return None
        if entry["kind"] == "optimizer":
            self.wants.findings.mismatched.append(f"{name}: it was saved as an optimizer, and is none now")
            return None
        kind = entry["kind"]
        owners: dict[str, Mapping[str, Any]] = {"module": self.live.modules, "averages": self.live.averages}
        if kind in owners and name not in owners[kind]:
            self.wants.findings.mismatched.append(f"{name}: it was saved as a {_KINDS[kind]}, and is none now")
            return None
        if "value" in entry:
            return entry["value"], ""
        axes, sizes = tuple(entry["axes"]), tuple(entry["sizes"])
        coordinate = coordinate_on(self._mesh, axes, self._rank)
        if coordinate is not None and axis_sizes(self._mesh, axes, self._world) == sizes:
            text = label(axes, coordinate)
            if text in entry["values"]:
                # The tensors of a tree are replicas under one key, those of objects are kept by coordinate.
                return entry["values"][text], "" if kind == "tensors" else text
        if not isinstance(self.live.statefuls.get(name), Reshards):
            saved = ", ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
            live = ", ".join(f"{axis}={size}" for axis, size in zip(self._mesh.axes, self._mesh.sizes, strict=True))
            way = "give the object a holdfast_reshard method"
            if name not in self.live.statefuls:
                way = "put an object with state_dict, load_state_dict and holdfast_reshard in its place"
            differs = f"{name}: its value differs along {saved} and the live mesh is {live}"
            self.wants.findings.mismatched.append(f"{differs}; {way}, or leave it out with ignore")
        return None

    def _new_tensors(
        self, name: str, value: Any, suffix: str, like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Fresh tensors for everything an encoded value refers to, as destinations.

        None if one of them cannot be filled, which the findings say: nobody shall get memory without values.
        """
        out = {}
        whole = True
        for key in references(value):
            stored = key_at(key, suffix)
            found = self.wants.contents.find(name, stored)
            if found is None:
                self.wants.findings.missing.append(f"{name}: {stored}")
                whole = False
                continue
            dtype = getattr(torch, found.logical)
            out[key] = torch.empty_like(like[key]) if key in like else torch.empty(found.logical_shape, dtype=dtype)
            whole = self.wants.want(name, stored, out[key], found) and whole
        return out if whole else None

    def _whole(self, name: str, value: Any, suffix: str) -> Any:
        """Another coordinate's state, tensors included, read at once: only resharding needs it."""
        read = self.wants.checkpoint.read
        tensors = {}
        for key in references(value):
            found = self.wants.contents.find(name, key_at(key, suffix))
            tensors[key] = _as_tensor(read(key_at(key, suffix), name), found.logical if found else "")
        return unflatten(value, tensors, name)


def _as_tensor(array: np.ndarray[Any, Any], logical: str) -> torch.Tensor:
    """A stored array as a tensor of its logical dtype, also of one that numpy itself does not have."""
    if array.dtype.kind in "biufc":
        tensor = torch.from_numpy(array)
        return tensor.to(getattr(torch, logical)) if logical and array.dtype.kind == "c" else tensor
    return torch.from_numpy(array.view(f"u{array.dtype.itemsize}")).view(getattr(torch, array.dtype.name))


def _takes_below(taken: Sequence[str], keys: Sequence[str], path: str) -> bool:
    """Whether keys of a submodule are taken; one whose keys are not known by its path may have any."""
    return any(is_below(key, path) for key in taken) or not any(is_below(key, path) for key in keys)


def _dtensors(name: str, target: Any) -> dict[str, torch.Tensor]:
    """The sharded tensors of a stateful object, whose layout a load must follow."""
    try:
        found = flatten(name, target.state_dict()).tensors
    except HoldfastError:
        return {}  # what it holds now cannot be stored; what it will hold can
    return {key: tensor for key, tensor in found.items() if isinstance(tensor, DTensor)}


def raise_mismatch(findings: Sequence[str], path: str) -> None:
    """One error that lists everything that does not fit."""
    shown = findings[:200]
    more = f"\n  ... and {len(findings) - len(shown)} more" if len(findings) > len(shown) else ""
    raise Mismatch(
        f"{path} does not fit the live state; nothing was loaded:\n  "
        + "\n  ".join(shown)
        + more
        + "\npass strict=False to load what fits, or only= and ignore= to choose"
    )
