"""Digests of the tensors inside values, by which ranks find the values that differ between them."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.adapters.tensors import fingerprint, holder_of
from holdfast.adapters.tree import Tree
from holdfast.layout.box import Box
from holdfast.plan.state_values import TREE, RankValue


def tensors_by_top_key(tree: Tree) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors below each key of a dict; keys may contain dots, so a tensor may be below several."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in tree.tensors.items():
        end = len(path)
        while end >= 0:
            if path[:end] in tree.value:
                out.setdefault(path[:end], {})[path] = tensor
            end = path.rfind(".", 0, end)
    return out


def item_digest(item: Any, tensors: dict[str, torch.Tensor]) -> str:
    """Return a string that is equal on ranks with the same value under a dict key. A bare reference needs no hash."""
    if not tensors and type(item) is dict and len(item) == 1:
        ((tag, content),) = item.items()
        if tag == "$tensor" and type(content) is str:
            return f"{tag} {content}"
    return RankValue.of(TREE, item, tensors_digest(Tree(item, tensors), on_devices=True)).digest


def tensors_digest(tree: Tree, *, on_devices: bool) -> str:
    """Return a string that is equal on ranks whose tensors inside a value are equal."""
    parts = []
    for key, tensor in sorted(tree.tensors.items()):
        holder = holder_of(tensor, key)
        parts.append(f"{key}:{holder.logical.name}:{list(holder.shape)}")
        whole = len(holder.parts) == 1 and holder.parts[0].box == Box.full(holder.shape)
        if whole and (on_devices or holder.local.device.type == "cpu"):
            parts.append(fingerprint(holder.local))
    return "\n".join(parts)
