"""Parameters of Paddle by the names that it numbers them with, such as linear_0.w_0, and by their keys.

An optimizer's state dict has the former; the model's has both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import Damaged
from holdfast.format import statejson
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.sources.paddle_names import POWERS, TORCH_NAMES
from holdfast.sources.paddle_pickles import table_of

MODEL, MASTERS, OPTIMIZER = "model", "master_weights", "optimizer"
_SCHEDULER = "LR_Scheduler"
_NAMES = "|".join((*TORCH_NAMES, *POWERS))
_STATIC = re.compile(rf"(?P<owner>.+?)(?:_fp32_master_[0-9]+)?[_./](?P<name>(?:{_NAMES})_[0-9]+)")
_MASTER = re.compile(r"(?P<owner>.+)_fp32_master_[0-9]+")
_KINDS = {MODEL: "module", MASTERS: "masters", OPTIMIZER: "optimizer"}

Tensors = dict[str, Recipe[Place]]


def split_state(key: str) -> tuple[str, str] | None:
    """A state's parameter and its name, of "linear_0.w_0_moment1_0" or "fc.weight.moment1_0"; None for others."""
    match = _STATIC.fullmatch(key)
    return (match["owner"], match["name"]) if match else None


class Sorted:
    """Tensors of state dicts sorted into groups; the states of an optimizer find their parameters' keys."""

    def __init__(self) -> None:
        self._groups: dict[str, Tensors] = {MODEL: {}, MASTERS: {}, OPTIMIZER: {}}
        self._keys: dict[str, str] = {}  # of parameters, by the names that Paddle numbers
        self.state: dict[str, Any] = {}

    def know(self, names: Mapping[str, str]) -> None:
        """The names that Paddle numbers parameters with, by their keys."""
        for key, name in names.items():
            self._keys.setdefault(name, key)

    def add_model(self, value: Mapping[str, Any], where: str) -> None:
        """The tensors of a model's state dict."""
        self.know(table_of(value))
        for key, recipe in value.items():
            if isinstance(recipe, Recipe):
                self._put(MODEL, key, recipe, where)

    def add_optimizer(self, value: Mapping[str, Any], where: str) -> None:
        """The states, masters and scheduler of an optimizer's state dict; its model's comes first."""
        for key, item in value.items():
            if isinstance(item, Recipe):
                found = split_state(key)
                self._put(OPTIMIZER, f"{self._key(found[0])}/{found[1]}" if found else key, item, where)
            elif key == MASTERS and isinstance(item, dict):
                self.add_masters(item, where)
            elif key == _SCHEDULER and isinstance(item, dict):
                plain = {name: part for name, part in item.items() if isinstance(part, int | float | str | bool)}
                self.state[_SCHEDULER] = {"kind": "json", "value": statejson.encode(plain, _SCHEDULER)}

    def add_masters(self, value: Mapping[str, Any], where: str) -> None:
        """Masters by their parameters' names or keys."""
        for key, recipe in value.items():
            if isinstance(recipe, Recipe):
                match = _MASTER.fullmatch(key)
                self._put(MASTERS, self._key(match["owner"] if match else key), recipe, where)

    def add_tensors(self, group: str, value: Mapping[str, Any], where: str) -> None:
        for key, recipe in value.items():
            if isinstance(recipe, Recipe):
                self._put(group, key, recipe, where)

    def groups(self) -> dict[str, Group]:
        """The groups that have tensors."""
        return {name: Group(_KINDS.get(name, "tensors"), found) for name, found in self._groups.items() if found}

    def _key(self, name: str) -> str:
        return self._keys.get(name, name)

    def _put(self, group: str, key: str, recipe: Recipe[Place], where: str) -> None:
        if self._groups.setdefault(group, {}).setdefault(key, recipe) is not recipe:
            raise Damaged(f"{where}: {group} has {key[:80]!r} twice")
