"""A partition of a model into branches: a module as one branch, or its children separately, each role once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from holdfast.spmd.autoplan.branch_walk import AxisTerms, Branch
from holdfast.spmd.autoplan.placement_options import Explorer, PlacementOption
from holdfast.spmd.autoplan.recording import Recording
from holdfast.spmd.autoplan.units import is_unit

SLACK = 1.05  # allowed excess over the least memory when partitions are compared


@dataclass(frozen=True, slots=True)
class PlannedBranch:
    """A branch that stands for all branches of its role."""

    branch: Branch
    role: str
    names: tuple[str, ...]
    options: tuple[PlacementOption, ...]

    @property
    def times(self) -> int:
        return len(self.names)


class Partition:
    """Partitions a model into branches: a module as one branch, or its children separately, whichever is cheaper."""

    def __init__(self, model: nn.Module, roles: Mapping[str, str], explorer: Explorer) -> None:
        self._modules = dict(model.named_modules())
        self._roles = roles
        self._explorer = explorer
        self._recording = explorer.recording
        self.leaves = _leaf_results(self._modules, self._recording)

    def parts(self, terms: tuple[AxisTerms, ...]) -> list[PlannedBranch]:
        """Return the planned branches; parameters outside of all of them are unassigned and stay whole."""
        return self._best("", terms)

    def _best(self, name: str, terms: tuple[AxisTerms, ...]) -> list[PlannedBranch]:
        own, below = self._own(name, terms), self._below(name, terms)
        if own is None:
            return below
        if self._is_undivided(name):
            return own
        most = SLACK * min(_least_held(parts) for parts in (own, below))
        return min((own, below), key=lambda parts: (_least_held(parts) > most, *_cost(parts)))

    def _own(self, name: str, terms: tuple[AxisTerms, ...]) -> list[PlannedBranch] | None:
        names = [other for other, role in self._roles.items() if role == self._roles[name]]
        names = [other for other in names if other in self._recording.calls]
        # The first may be at the model's input, which has no gradients: the second stands for all.
        branch = self.branch(names[1] if len(names) > 1 else name)
        if branch is None:
            return None
        options = self._explorer.options(branch, terms)
        return [PlannedBranch(branch, self._roles[name], tuple(names), tuple(options))] if options else None

    def branch(self, name: str) -> Branch | None:
        """Return a module as a branch; None if it was not called with a tensor."""
        call = self._recording.calls.get(name)
        if call is None or call.first is None or call.result is None:
            return None
        steps = tuple(self._recording.under(name))
        is_last = call.result in self._recording.outputs[:1]  # keeps its placement: its uses are unknown here
        return Branch(name, steps, self.leaves, call.first, call.result, is_last)

    def _is_undivided(self, name: str) -> bool:
        """Return True for a leaf, or a module that uses parameters other than those of its children."""
        module = self._modules[name]
        if is_unit(module) or not any(True for _ in module.children()):
            return True
        values = self._recording.values
        own = [step for step in self._recording.steps if step.module == name]
        return any(values[number].key is not None for step in own for number in step.inputs)

    def _below(self, name: str, terms: tuple[AxisTerms, ...]) -> list[PlannedBranch]:
        """Return the planned branches of the children."""
        if is_unit(self._modules[name]):
            return []
        seen: dict[str, list[PlannedBranch]] = {}
        for child, below in self._modules[name].named_children():
            full = f"{name}.{child}" if name else child
            role = self._roles.get(full)  # None if the module also occurs elsewhere
            if role is not None and role not in seen and any(True for _ in below.parameters()):
                seen[role] = self._best(full, terms)
        return [part for branches in seen.values() for part in branches]


def _least_held(parts: list[PlannedBranch]) -> float:
    return sum(part.times * min(option.held for option in part.options) for part in parts)


def _cost(parts: list[PlannedBranch]) -> tuple[float, int]:
    """Return the score at about the least memory, then the number of branches."""
    total = 0.0
    for part in parts:
        least = min(option.held for option in part.options)
        total += part.times * min(option.score for option in part.options if option.held <= least * SLACK)
    return total, len(parts)


def _leaf_results(modules: Mapping[str, nn.Module], recording: Recording) -> frozenset[int]:
    results = set()
    for name, call in recording.calls.items():
        module = modules[name]
        has_own = is_unit(module) or any(True for _ in module.parameters(recurse=False))
        if has_own and call.result is not None:
            results.add(call.result)
    return frozenset(results)
