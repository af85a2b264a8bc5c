"""Loading: find where everything goes in the live state, then hand over what is not filled in place.

All targets are found before anything is touched, so that every missing key, shape and dtype
is known at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.adapters.entries import LiveState, Reshards
from holdfast.adapters.module import set_extra_state
from holdfast.adapters.numbered import name_numbered
from holdfast.adapters.optimizer_targets import Action, OptimizerTargets
from holdfast.adapters.schedulers import regroup
from holdfast.adapters.tree import flatten, unflatten
from holdfast.adapters.wants import Wants
from holdfast.core.errors import HoldfastError, Mismatch, Unsupported
from holdfast.layout.coordinates import axis_sizes, coordinate_on, key_at, label, parse_label
from holdfast.layout.mesh import Mesh
from holdfast.plan.files import Place
from holdfast.plan.references import references


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

    def find(self, state: MutableMapping[str, Any]) -> None:
        """Look for everything the live state needs. Touches nothing."""
        named = name_numbered(self.wants.contents, self.live)
        self.wants.contents = named.contents
        self._notes += named.notes
        for name in self.live.modules:
            self._find_module(name)
        for name, optimizer in self.live.optimizers.items():
            if name in named.problems:
                if self.wants.choice.takes_entry(name):
                    self.wants.findings.mismatched.append(named.problems[name])
                continue
            targets = OptimizerTargets(name, optimizer, self.live, self.wants)
            targets.find()
            self._actions += targets.actions
            self._optimizers.append(targets)
        for name in self.live.averages:
            self._find_averages(name)
        for name in self.live.trees:
            self._find_tree(name)
        for name in filter(self.wants.choice.takes_entry, self.live.statefuls):
            self._find_stateful(name)
        for name in filter(self.wants.choice.takes_entry, self.live.values):
            self._find_value(name, state)

    @property
    def has_actions(self) -> bool:
        return bool(self._actions)

    @property
    def values(self) -> int:
        """How many values that are not tensors this rank takes."""
        chosen = (*self.live.averages, *self.live.statefuls, *self.live.values)
        return sum(name in self.wants.contents.state and self.wants.choice.takes_entry(name) for name in chosen)

    def finish(self) -> list[str]:
        """Once all tensors are in: hand over what is not filled in place; returns what is worth knowing."""
        for action in self._actions:
            action()
        return [*self._notes, *(note for targets in self._optimizers for note in targets.notes)]

    @property
    def groups(self) -> list[str]:
        """The groups of tensors that this rank's state names."""
        averages = [self.live.averages_group(name) for name in self.live.averages]
        return [*self.live.modules, *self.live.optimizers, *averages, *self.live.trees]

    def unexpected(self, wanted: set[str], groups: Iterable[str]) -> list[str]:
        """Stored keys of the groups in any rank's state that no rank wants."""
        out = []
        for group in groups:
            stored = self.wants.contents.groups.get(group)
            if stored is None:
                continue
            aliases: dict[str, list[str]] = {}
            for alias, key in stored.aliases.items():
                aliases.setdefault(key, []).append(alias)
            for key in stored.tensors:
                if f"{group}: {key}" not in wanted and self.wants.choice.takes(group, key, *aliases.get(key, ())):
                    out.append(f"{group}: {key}")
        return out

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
        for key, tensor in view.tensors.items():
            stored = view.stored_key(key)
            chosen = self.wants.choice.takes(name, stored, *view.aliases_of(stored))
            if chosen and key != stored:
                self.wants.findings.wanted.append(f"{name}: {key}")  # other tools store tied weights twice
            if not chosen or (stored, id(tensor)) in seen:
                continue
            if key in view.copies:
                raise Unsupported(
                    f"{name}: {key} in the module's state_dict is a copy, so that a load could not reach the module; "
                    "leave it out with ignore, and load it by hand"
                )
            seen.add((stored, id(tensor)))
            self.wants.want_parameter(name, key, stored, tensor)
        if view.extra and not self.wants.choice.only:
            self._find_extra(name)

    def _find_extra(self, name: str) -> None:
        found = self._entry_value(name)
        if found is None:
            return
        extras = self.live.modules[name].extra
        value, suffix = {key: item for key, item in found[0].items() if key in extras}, found[1]
        self.wants.findings.missing += [f"{name}: {key}" for key in extras if key not in value]
        tensors = self._new_tensors(name, value, suffix, {})

        def give() -> None:
            for key, extra in unflatten(value, tensors, name).items():
                set_extra_state(self.live.modules[name], key, extra)

        self._actions.append(give)

    def _find_averages(self, name: str) -> None:
        value, group = self.live.averages[name], self.live.averages_group(name)
        for key, tensor in value.holdfast_averages().items():
            if self.wants.choice.takes(group, key):
                self.wants.want(group, key, tensor)
        if self.wants.choice.takes_entry(name):
            found = self._entry_value(name)
            if found is not None:
                count = unflatten(found[0], {}, name)
                self._actions.append(lambda: value.holdfast_resume(count))

    def _find_tree(self, name: str) -> None:
        value = self.live.trees[name]
        tensors = flatten(name, value).tensors
        for key, tensor in tensors.items():
            if self.wants.choice.takes(name, key):
                self.wants.want(name, key, tensor)
        known = name in self.wants.contents.state or name not in self.wants.contents.groups
        if not isinstance(value, dict) or not known or not self.wants.choice.takes_entry(name):
            return
        found = self._entry_value(name)
        if found is None:
            return
        # Keys whose tensors the live dict lacks are another rank's, or unexpected and listed as such.
        held = found[0]
        if isinstance(held, dict) and "$dict" not in held:
            held = {key: item for key, item in held.items() if references(item).keys() <= tensors.keys()}
        elif not references(held).keys() <= tensors.keys():
            return
        self._actions.append(lambda: value.update(unflatten(held, tensors, name)))

    def _find_stateful(self, name: str) -> None:
        target = self.live.statefuls[name]
        found = self._entry_value(name)
        if found is not None:
            value, suffix = found
            tensors = self._new_tensors(name, value, suffix, _dtensors(name, target))

            def give() -> None:
                loaded = unflatten(value, tensors, name)
                target.load_state_dict(regroup(target, loaded, self.live, self.wants.contents.state))

            self._actions.append(give)
        elif isinstance(target, Reshards) and name in self.wants.contents.state:
            values = self.wants.contents.state[name]["values"]
            states = {parse_label(text): self._whole(name, value, text) for text, value in values.items()}
            made = target.holdfast_reshard(states, self._rank, self._world)
            self._actions.append(lambda: target.load_state_dict(made))

    def _find_value(self, name: str, state: MutableMapping[str, Any]) -> None:
        found = self._entry_value(name)
        if found is not None:
            value, suffix = found
            tensors = self._new_tensors(name, value, suffix, {})
            self._actions.append(lambda: state.__setitem__(name, unflatten(value, tensors, name)))

    def _entry_value(self, name: str) -> tuple[Any, str] | None:
        """This rank's value of a state.json entry and the suffix of its tensors' keys."""
        contents = self.wants.contents
        entry = contents.state.get(name)
        if entry is None:
            has = ", ".join(sorted({*contents.groups, *contents.state}))
            self.wants.findings.missing.append(f"{name}: the checkpoint has {has or 'nothing'}")
            return None
        if entry["kind"] == "optimizer":
            self.wants.findings.mismatched.append(f"{name}: it was saved as an optimizer, and is none now")
            return None
        if "value" in entry:
            return entry["value"], ""
        axes, sizes = tuple(entry["axes"]), tuple(entry["sizes"])
        coordinate = coordinate_on(self._mesh, axes, self._rank)
        if coordinate is not None and axis_sizes(self._mesh, axes, self._world) == sizes:
            text = label(axes, coordinate)
            if text in entry["values"]:
                return entry["values"][text], text
        if not isinstance(self.live.statefuls.get(name), Reshards):
            saved = ", ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
            live = ", ".join(f"{axis}={size}" for axis, size in zip(self._mesh.axes, self._mesh.sizes, strict=True))
            self.wants.findings.mismatched.append(
                f"{name}: its value differs along {saved} and the live mesh is {live}; give the object a "
                "holdfast_reshard method, or leave it out with ignore"
            )
        return None

    def _new_tensors(
        self, name: str, value: Any, suffix: str, like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Fresh tensors for everything an encoded value refers to, as destinations."""
        out = {}
        for key in references(value):
            stored = key_at(key, suffix)
            found = self.wants.contents.find(name, stored)
            if found is None:
                self.wants.findings.missing.append(f"{name}: {stored}")
                continue
            dtype = getattr(torch, found.logical)
            out[key] = torch.empty_like(like[key]) if key in like else torch.empty(found.logical_shape, dtype=dtype)
            self.wants.want(name, stored, out[key], found)
        return out

    def _whole(self, name: str, value: Any, suffix: str) -> Any:
        """Another coordinate's state, tensors included, read at once: only resharding needs it."""
        read = self.wants.checkpoint.read
        tensors = {key: torch.from_numpy(read(key_at(key, suffix), name)) for key in references(value)}
        return unflatten(value, tensors, name)


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
