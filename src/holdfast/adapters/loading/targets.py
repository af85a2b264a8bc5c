"""All load targets of a rank: find them kind by kind, list unexpected keys, raise Mismatch, assign other values.

All targets are found before anything is modified, so that every missing key and every mismatched shape
and dtype is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from holdfast.adapters.live_state import LiveState
from holdfast.adapters.loading.module_targets import Incompatible, ModuleTargets
from holdfast.adapters.loading.numbered_optimizers import key_numbered_optimizers
from holdfast.adapters.loading.optimizer_targets import Action, OptimizerTargets
from holdfast.adapters.loading.value_targets import StateEntries, ValueTargets
from holdfast.adapters.loading.wants import LoadRequests
from holdfast.core.errors import Mismatch
from holdfast.core.names import ADAPTER, BASE, BUFFERS, is_group_of
from holdfast.layout.placement import Mesh
from holdfast.plan.files import Place


class Targets:
    """Everything that one rank's live state loads from a checkpoint."""

    def __init__(self, live: LiveState, requests: LoadRequests, mesh: Mesh, rank: int, world: int) -> None:
        self.live = live
        self.requests = requests
        entries = StateEntries(live, requests, mesh, rank, world)
        self._modules = ModuleTargets(live, requests, entries)
        self._values = ValueTargets(live, requests, entries, rank)
        self._optimizers: list[OptimizerTargets] = []
        self._actions: list[Action] = []
        self._notes: list[str] = []
        self._shared = False
        self.base_notes: list[str] = []  # on base models of adapters that were not compared

    def find(self, state: MutableMapping[str, Any]) -> None:
        """Find the destination of everything the live state needs. Modifies nothing."""
        problems: Mapping[str, str] = {}
        if self.live.optimizers:
            keyed = key_numbered_optimizers(self.requests.contents, self.live)
            self.requests.contents, problems = keyed.contents, keyed.problems
            self._notes += keyed.notes
        for name in self.live.modules:
            self._modules.find(name)
        for name, optimizer in self.live.optimizers.items():
            if name in problems:
                if self.requests.choice.selects_entry(name):
                    self.requests.findings.mismatched.append(problems[name])
                continue
            targets = OptimizerTargets(name, optimizer, self.live, self.requests)
            targets.find()
            self._optimizers.append(targets)
        self._values.find(state)
        optimizer_actions = [action for targets in self._optimizers for action in targets.actions]
        self._actions = [*self._modules.actions, *optimizer_actions, *self._values.actions]
        self._shared = self.requests.stage_shared()

    @property
    def has_actions(self) -> bool:
        return self._shared or self.requests.meta.has_used or bool(self._actions)

    @property
    def not_stored(self) -> list[str]:
        """The buffers of loaded modules that no checkpoint contains."""
        return self._modules.not_stored

    def count_value_entries(self) -> int:
        """Return the number of entries with values other than tensors that this rank loads."""
        loaded = {*self._modules.loaded, *self._values.loaded}
        return len(loaded) + sum(targets.loads_options for targets in self._optimizers)

    @property
    def values(self) -> int:
        """The number of values other than tensors that this rank loads."""
        kinds = {*self.live.averages, *self.live.statefuls, *self.live.values, *self._values.trees_with_values}
        return len(kinds & set(self._values.loaded))

    def finish(self, incompatible: Incompatible) -> list[str]:
        """Assign the values not filled in place, once all tensors are loaded, and return notes for the user.

        Post-hooks of the modules may change the incompatible keys.
        """
        self._modules.incompatible = incompatible
        self.requests.copy_shared()
        self.requests.meta.exchange()
        for action in self._actions:
            action()
        notes = [*self._notes, *self._modules.notes, *self._values.notes]
        return [*notes, *(note for targets in self._optimizers for note in targets.notes)]

    @property
    def live_parts(self) -> Mapping[str, Mapping[str, str]]:
        """Digests of live states that the loaded ones follow, by name and part."""
        return self._values.live_parts

    def compare_live(self, parts: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
        """Take the `live_parts` of all ranks, before `finish`."""
        self._values.compare_live(parts)

    @property
    def groups(self) -> list[str]:
        """The groups of tensors in this rank's state, and those of adapters that only the checkpoint has."""
        own = self.live.groups
        stored = self.requests.contents.groups.items()
        adapters = [group for group, members in stored if members.kind in (ADAPTER, BASE, BUFFERS)]
        of_live = [group for group in adapters if any(is_group_of(group, name) for name in self.live.parts)]
        return list(dict.fromkeys([*own, *of_live]))

    def unexpected(self, wanted: set[str], groups: Iterable[str]) -> list[str]:
        """Return the stored keys of `groups`, those in any rank's state, that no rank requested."""
        out = []
        for group in groups:
            for key in self._stored_extras(group):
                if f"{group}: {key}" not in wanted and self.requests.choice.selects(group, key):
                    out.append(f"{group}: {key}")
            stored = self.requests.contents.groups.get(group)
            if stored is None:
                continue
            outer = self.requests.subclasses(group).outer
            aliases: dict[str, list[str]] = {}
            for alias, key in stored.aliases.items():
                aliases.setdefault(key, []).append(alias)
            for key in stored.tensors:
                names = (*aliases.get(key, ()), *((outer[key],) if key in outer else ()))
                if f"{group}: {key}" not in wanted and self.requests.choice.selects(group, key, *names):
                    out.append(f"{group}: {key}")
        return out

    def _stored_extras(self, group: str) -> list[str]:
        """Return the keys of the extra states that a module was saved with, on any rank."""
        entry = self.requests.contents.state.get(group, {})
        if entry.get("kind") != "module":
            return []
        values = [entry["value"]] if "value" in entry else list(entry["values"].values())
        return sorted({key for value in values if isinstance(value, dict) for key in value})

    def describe(self) -> Iterator[list[Any]]:
        """Yield this rank's requests as ranks exchange them: file, key in the file, and boxes."""
        by_place: dict[Place, list[list[int]]] = {}
        for place, box in self.requests.destinations:
            by_place.setdefault(place, []).append([*box.offsets, *box.sizes])
        for place, boxes in by_place.items():
            yield [place.file, place.spec.key, boxes]


def raise_mismatch(findings: Sequence[str], path: str) -> None:
    """Raise a Mismatch that lists everything that does not match the live state."""
    shown = findings[:200]
    more = f"\n  ... and {len(findings) - len(shown)} more" if len(findings) > len(shown) else ""
    raise Mismatch(
        f"{path} does not match the live state; nothing was loaded:\n  "
        + "\n  ".join(shown)
        + more
        + "\npass strict=False to load the matching part, or only= and ignore= to select keys"
    )
