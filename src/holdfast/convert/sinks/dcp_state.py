"""Contents as a nested state dict, with stand-ins where tensors will be. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapters.optimizer_options import decode_options
from holdfast.core.errors import Damaged
from holdfast.format import statejson
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that is read when its turn comes: its recipe, and the dtype it has in torch."""

    recipe: Recipe[Place]
    logical: DType

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.logical.name)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return self.recipe.shape[:-1] if self.logical.pair else self.recipe.shape

    def stored_box(self, box: Box) -> Box:
        """A box of the tensor in the coordinates of what is stored, where complex numbers are pairs."""
        return Box((*box.offsets, 0), (*box.sizes, 2)) if self.logical.pair else box

    def tensor(self, raw: Any, box: Box) -> torch.Tensor:
        """The torch tensor of raw elements that were read for a box."""
        flat = torch.from_numpy(raw.reshape(-1).view("u1"))
        return flat.view(self.dtype).reshape(box.sizes)


class NestedState:
    """The state dict of a checkpoint; `pending` finds what each stand-in stands for."""

    def __init__(self, contents: Contents) -> None:
        self._pending: dict[int, Pending] = {}
        self.state: dict[str, Any] = {}
        tensors = {name: self._tensors(group) for name, group in contents.groups.items() if group.kind != "optimizer"}
        for name, known in tensors.items():
            self.state[name.replace("/", ".")] = known
        for name, entry in contents.state.items():
            if entry.get("kind") != "optimizer" and "value" in entry:
                self._add_value(name, entry, tensors.get(name, {}))
        if contents.step is not None:
            self.state.setdefault("step", contents.step)
        for name, group in contents.groups.items():
            if group.kind == "optimizer":
                self.state[name] = self._optimizer(name, group, contents)

    def pending(self, stand_in: torch.Tensor) -> Pending:
        return self._pending[id(stand_in)]

    def _stand_in(self, recipe: Recipe[Place], logical: str | None) -> torch.Tensor:
        pending = Pending(recipe, dtype_named(logical) if logical else recipe.dtype)
        stand_in = torch.empty(pending.shape, dtype=pending.dtype, device="meta")
        self._pending[id(stand_in)] = pending
        return stand_in

    def _tensors(self, group: Group) -> dict[str, Any]:
        """Tensors by key, tied ones under every key."""
        found = {key: self._stand_in(recipe, group.logical.get(key)) for key, recipe in group.tensors.items()}
        return found | {
            alias: self._stand_in(group.tensors[k], group.logical.get(k)) for alias, k in group.aliases.items()
        }

    def _add_value(self, name: str, entry: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        def make(tag: str, content: Any) -> Any:
            if tag in ("$tensor", "$array") and content in known:
                return known[content]
            raise Damaged(f"{name}: the unknown tag {tag[:40]!r}")

        value = statejson.decode(entry["value"], name, make)
        if entry["kind"] == "module" and isinstance(value, dict):
            self.state[name] = {**known, **value}  # the extra states of modules are beside their tensors
        else:
            self.state[name] = value

    def _optimizer(self, name: str, group: Group, contents: Contents) -> dict[str, Any]:
        states: dict[str, dict[str, Any]] = {}
        for key, recipe in group.tensors.items():
            param, _, state_name = key.rpartition("/")
            states.setdefault(param, {})[state_name] = self._stand_in(recipe, group.logical.get(key))
        entry = contents.state.get(name, {})
        for param, values in entry.get("scalars", {}).items():
            states.setdefault(param, {}).update(statejson.decode(values, name))
        masters = contents.groups.get("master_weights")
        # Those of a numbered one are in its own group.
        if entry.get("masters") and masters is not None and not entry.get("numbered"):
            for param, recipe in masters.tensors.items():
                states.setdefault(param, {})[entry["masters"]] = self._stand_in(recipe, None)
        told = entry.get("groups", ())
        groups = [decode_options(one["options"], name) | {"params": list(one["params"])} for one in told]
        if entry.get("numbered"):  # torch has them as numbers
            groups = [group | {"params": [int(number) for number in group["params"]]} for group in groups]
        return {"state": states, "param_groups": groups}
