"""One rank's state as collected for a save: tensors to save, and values reported to the other ranks."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.adapters.optimizer import StateTensor
from holdfast.adapters.saving.save_item import SaveItem
from holdfast.adapters.tensors import Holders, fingerprint, holder_of
from holdfast.adapters.tree import Tree
from holdfast.format.dtypes import DType
from holdfast.format.names import check_key
from holdfast.layout.box import Box
from holdfast.layout.coordinates import key_at
from holdfast.plan.state_values import FILE, FILE_PREFIX, OPTIMIZER, PLAN, PLAN_PREFIX, SPLIT_DICT, TREE, RankValue


@dataclass(slots=True)
class Collected:
    """One rank's state, ready to be planned."""

    items: list[SaveItem] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)
    tree_kinds: dict[str, str] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    plans: dict[str, Any] = field(default_factory=dict)
    owners: dict[str, list[str]] = field(default_factory=dict)
    live_optimizers: list[Any] = field(default_factory=list)
    holders: Holders = field(default_factory=Holders)
    notices: list[str] = field(default_factory=list)  # warnings for the user about this state
    fixed: int = 0  # number of items that belong to modules and optimizers; these come first

    def signature(self) -> Any:
        """Return a value that is equal while this rank holds the same tensors in the same layout."""
        items = [
            (o.group, o.key, o.role, o.logical.name, o.holder.shape, o.holder.parts, o.holder.local.device)
            for o in self.items
        ]
        return items, dict(self.kinds), dict(self.aliases), dict(self.owners)

    def add(self, group: str, key: str, role: str, value: StateTensor, cast: DType | None = None) -> None:
        """Add a tensor to save."""
        check_key(key, group)
        holder = self.holders.of(value, f"{group}: {key}")
        source = weakref.ref(value) if isinstance(value, torch.Tensor) else None
        self.items.append(SaveItem(group, key, role, holder, cast, source))

    def by_name(self) -> dict[tuple[str, str], list[SaveItem]]:
        """Return the items of each tensor, by group and key."""
        out: dict[tuple[str, str], list[SaveItem]] = {}
        for item in self.items:
            out.setdefault((item.group, item.key), []).append(item)
        return out

    def add_tree_tensors(self, labels: Mapping[str, str]) -> None:
        """Add the tensors inside values, under the coordinates along which the values differ between ranks."""
        for name, tree in self.trees.items():
            for key, tensor in tree.tensors.items():
                self.add(name, key_at(key, labels.get(name, "")), "value", tensor)

    def value_reports(self, partitioned: Collection[str], *, on_devices: bool = True) -> dict[str, RankValue]:
        """Return every value that is not a tensor, as this rank reports it to the other ranks.

        Comparing device tensors inside values synchronizes with the device; `on_devices=False` skips them.
        """
        out: dict[str, RankValue] = {}
        for name, tree in self.trees.items():
            own = self.partitioned_report(name) if name in partitioned else None
            content = [self.tree_kinds[name], tree.value]
            out[name] = own or RankValue.of(TREE, content, _tensors_digest(tree, on_devices=on_devices))
        for name, content in self.optimizers.items():
            out[name] = RankValue.of(OPTIMIZER, content)
        for name, data in self.files.items():
            out[FILE_PREFIX + name] = RankValue.of(FILE, data.decode())
        for name, plan in self.plans.items():
            out[PLAN_PREFIX + name] = RankValue.of(PLAN, plan)
        return out

    def partitioned_report(self, name: str) -> RankValue | None:
        """Return the report of a dict whose keys may be partitioned over ranks, as pipeline stages do.

        None for a value that is neither a dict of tensors nor the extra states of a module.
        """
        kind, tree = self.tree_kinds[name], self.trees[name]
        plain = isinstance(tree.value, dict) and not any(key.startswith("$") for key in tree.value)
        if kind not in ("tensors", "module") or not plain:
            return None
        own = _tensors_by_top_key(tree)
        digests = {key: _item_digest(item, own.get(key, {})) for key, item in tree.value.items()}
        return RankValue.of(SPLIT_DICT, {"kind": kind, "value": tree.value, "digests": digests})


def _tensors_by_top_key(tree: Tree) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors below each key of a dict; keys may contain dots, so a tensor may be below several."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in tree.tensors.items():
        end = len(path)
        while end >= 0:
            if path[:end] in tree.value:
                out.setdefault(path[:end], {})[path] = tensor
            end = path.rfind(".", 0, end)
    return out


def _item_digest(item: Any, tensors: dict[str, torch.Tensor]) -> str:
    """Return a string that is equal on ranks with the same value under a dict key. A bare reference needs no hash."""
    if not tensors and type(item) is dict and len(item) == 1:
        ((tag, content),) = item.items()
        if tag == "$tensor" and type(content) is str:
            return f"{tag} {content}"
    return RankValue.of(TREE, item, _tensors_digest(Tree(item, tensors), on_devices=True)).digest


def _tensors_digest(tree: Tree, *, on_devices: bool) -> str:
    """Return a string that is equal on ranks whose tensors inside a value are equal."""
    parts = []
    for key, tensor in sorted(tree.tensors.items()):
        holder = holder_of(tensor, key)
        parts.append(f"{key}:{holder.logical.name}:{list(holder.shape)}")
        whole = len(holder.parts) == 1 and holder.parts[0].box == Box.full(holder.shape)
        if whole and (on_devices or holder.local.device.type == "cpu"):
            parts.append(fingerprint(holder.local))
    return "\n".join(parts)
