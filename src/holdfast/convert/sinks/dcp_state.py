"""Contents as the nested state dict of a DCP folder, with meta tensors as placeholders. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapters.optimizer_options import decode_options
from holdfast.core.errors import Damaged, Unsupported
from holdfast.format import statejson
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.plan.state_references import references


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """A tensor that has not been read yet: its recipe and its torch dtype."""

    recipe: Recipe[Place]
    logical: DType

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.logical.name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.recipe.shape[:-1] if self.logical.pair else self.recipe.shape

    def stored_box(self, box: Box) -> Box:
        """Convert a box to the coordinates of the stored tensor, in which complex numbers are pairs."""
        return Box((*box.offsets, 0), (*box.sizes, 2)) if self.logical.pair else box

    def tensor(self, raw: Any, box: Box) -> torch.Tensor:
        """Convert the raw elements of a box to a torch tensor."""
        flat = torch.from_numpy(raw.reshape(-1).view("u1"))
        return flat.view(self.dtype).reshape(box.sizes)


class NestedState:
    """The state dict of a checkpoint. `pending` returns the tensor of each placeholder."""

    def __init__(self, contents: Contents) -> None:
        self._pending: dict[int, PendingTensor] = {}
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

    def pending(self, placeholder: torch.Tensor) -> PendingTensor:
        return self._pending[id(placeholder)]

    def _placeholder(self, recipe: Recipe[Place], logical: str | None) -> torch.Tensor:
        pending = PendingTensor(recipe, dtype_named(logical) if logical else recipe.dtype)
        placeholder = torch.empty(pending.shape, dtype=pending.dtype, device="meta")
        self._pending[id(placeholder)] = pending
        return placeholder

    def _tensors(self, group: Group) -> dict[str, Any]:
        """Return the tensors by key, with tied tensors under every key."""
        tensors = {key: self._placeholder(recipe, group.logical.get(key)) for key, recipe in group.tensors.items()}
        return tensors | {
            alias: self._placeholder(group.tensors[k], group.logical.get(k)) for alias, k in group.aliases.items()
        }

    def _add_value(self, name: str, entry: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        def make(tag: str, content: Any) -> Any:
            if tag in ("$tensor", "$array") and content in known:
                return known[content]
            raise Damaged(f"{name}: unknown tag {tag[:40]!r}")

        value = statejson.decode(entry["value"], name, make)
        if entry["kind"] == "module" and isinstance(value, dict):
            self.state[name] = {**known, **value}  # extra states of modules are siblings of their tensors
        else:
            self.state[name] = value

    def _optimizer(self, name: str, group: Group, contents: Contents) -> dict[str, Any]:
        states: dict[str, dict[str, Any]] = {}
        for key, recipe in group.tensors.items():
            param, _, state_name = key.rpartition("/")
            states.setdefault(param, {})[state_name] = self._placeholder(recipe, group.logical.get(key))
        entry = contents.state.get(name, {})
        nested = next(iter(references(entry.get("scalars", {}))), None)
        if nested is not None:
            raise Unsupported(f"{name}: states with tensors inside, such as {nested}, cannot be written as torch DCP")
        for param, values in entry.get("scalars", {}).items():
            states.setdefault(param, {}).update(statejson.decode(values, name))
        masters = contents.groups.get("master_weights")
        # The masters of a numbered optimizer are in its own group.
        if entry.get("masters") and masters is not None and not entry.get("numbered"):
            for param, recipe in masters.tensors.items():
                states.setdefault(param, {})[entry["masters"]] = self._placeholder(recipe, None)
        groups = [
            decode_options(fields["options"], name) | {"params": list(fields["params"])}
            for fields in entry.get("groups", ())
        ]
        if entry.get("numbered"):  # torch expects integers
            groups = [group | {"params": [int(number) for number in group["params"]]} for group in groups]
        return {"state": states, "param_groups": groups}
