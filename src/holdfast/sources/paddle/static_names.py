"""Paddle's numbered names (linear_0.w_0) matched to keys; models, optimizers and schedulers sorted into groups.

An optimizer's state dict has only the names; the model's has both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import Damaged
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.sources.paddle.optimizer_names import POWERS, TORCH_NAMES
from holdfast.sources.paddle.pdparams_nested import Flat, flattened, plain_entries

MODEL, MASTERS, OPTIMIZER = "model", "master_weights", "optimizer"
_SCHEDULER = "LR_Scheduler"
_NAMES = "|".join((*TORCH_NAMES, *POWERS))
_STATIC = re.compile(rf"(?P<owner>.+?)(?:_fp32_master_[0-9]+)?[_./](?P<name>(?:{_NAMES})_[0-9]+)")
_MASTER = re.compile(r"(?P<owner>.+)_fp32_master_[0-9]+")
_KINDS = {MODEL: "module", MASTERS: "masters", OPTIMIZER: "optimizer"}

Tensors = dict[str, Recipe[Place]]


def split_state(key: str) -> tuple[str, str] | None:
    """Split "linear_0.w_0_moment1_0" or "fc.weight.moment1_0" into parameter and state name; None for other keys."""
    match = _STATIC.fullmatch(key)
    return (match["owner"], match["name"]) if match else None


class PaddleGroups:
    """Tensors of state dicts sorted into groups; optimizer states are matched to their parameters' keys."""

    def __init__(self) -> None:
        self._groups: dict[str, Tensors] = {MODEL: {}, MASTERS: {}, OPTIMIZER: {}}
        self._keys: dict[str, str] = {}  # parameter keys by numbered Paddle name
        self.state: dict[str, Any] = {}
        self.notes: list[str] = []

    def add_names(self, names: Mapping[str, str]) -> None:
        """Record the numbered names of parameters, given by key."""
        for key, name in names.items():
            self._keys.setdefault(name, key)

    def add_model(self, value: Any, where: str) -> None:
        """Add the tensors of a model's state dict, which may be nested."""
        flat = flattened(value, where)
        self.add_names(flat.names)
        self._put_all(MODEL, flat)

    def add_optimizer(self, value: Any, where: str) -> None:
        """Add the states, master weights and scheduler of an optimizer's state dict, after its model's."""
        own = value if isinstance(value, dict) else {}
        masters, scheduler = own.get(MASTERS), own.get(_SCHEDULER)
        rest = {key: item for key, item in own.items() if key not in (MASTERS, _SCHEDULER)}
        flat = flattened(rest if own else value, where)
        for key, recipe in flat.tensors.items():
            found = split_state(key)
            self._put(OPTIMIZER, f"{self._key(found[0])}/{found[1]}" if found else key, recipe, where)
        self.add_values(flat.values, where)
        if masters is not None:
            self.add_masters(masters, where)
        if scheduler is not None:
            self._add_scheduler(scheduler, where)

    def _add_scheduler(self, value: Any, where: str) -> None:
        """Add a scheduler's plain values; its tensors are added to the optimizer's."""
        flat = flattened(value, where)
        for key, recipe in flat.tensors.items():
            self._put(OPTIMIZER, f"{_SCHEDULER}.{key}", recipe, where)
        self.add_values({_SCHEDULER: flat.values}, where)

    def add_masters(self, value: Any, where: str) -> None:
        """Add master weights by their parameters' names or keys."""
        flat = flattened(value, where)
        for key, recipe in flat.tensors.items():
            match = _MASTER.fullmatch(key)
            self._put(MASTERS, self._key(match["owner"] if match else key), recipe, where)
        self.add_values(flat.values, where)

    def add_tensors(self, group: str, value: Any, where: str) -> None:
        """Add the tensors of a tree that is neither a model nor an optimizer as a group."""
        self._put_all(group, flattened(value, where))

    def add_values(self, values: Mapping[str, Any], where: str) -> None:
        """Add plain values by name. A value that differs between files is reported and left out."""
        entries, notes = plain_entries(values, where)
        self.notes += notes
        for name, entry in entries.items():
            if self.state.setdefault(name, entry) != entry:
                self.notes.append(f"{where}: left out: {name[:80]!r} has a different value in another file or dict")

    def _put_all(self, group: str, flat: Flat) -> None:
        for key, recipe in flat.tensors.items():
            self._put(group, key, recipe, flat.where)
        self.add_values(flat.values, flat.where)

    def groups(self) -> dict[str, Group]:
        """Return the groups that have tensors; a plain value with the name of a group is renamed."""
        for name in [name for name in self.state if self._groups.get(name)]:
            self.state[f"{name}.value"] = self.state.pop(name)
        return {name: Group(_KINDS.get(name, "tensors"), found) for name, found in self._groups.items() if found}

    def _key(self, name: str) -> str:
        return self._keys.get(name, name)

    def _put(self, group: str, key: str, recipe: Recipe[Place], where: str) -> None:
        if self._groups.setdefault(group, {}).setdefault(key, recipe) is not recipe:
            raise Damaged(f"{where}: {group} has {key[:80]!r} twice")
