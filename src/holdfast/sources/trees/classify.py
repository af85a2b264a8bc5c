"""Classify the parts of a foreign tree by name and shape: the model, the optimizers, and everything else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.sources.trees.flat_optimizers import keys_in, split_root
from holdfast.sources.trees.leaf import TensorLeaf, has_leaf
from holdfast.sources.trees.torch_optimizer import OptimizerState, optimizer_in

OTHERS = "tensors"
_MODELS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZERS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state")
_FLAT_OPTIMIZER = re.compile(r"(?:chained_[0-9]+\.)?(?:optimizer|optim)\.((?:state|param_groups)\..+)")
_OF_OPTIMIZER = frozenset({"state", "param_groups"})


@dataclass(slots=True)
class ClassifiedTree:
    """The parts of a tree by kind."""

    model: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, OptimizerState] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


def classify_tree(tree: Any) -> ClassifiedTree:
    """Classify the parts of a tree. Optimizers are never merged: only a single one is named "optimizer"."""
    return _sort(_unwrapped(tree))


def _unwrapped(tree: Any) -> dict[str, Any]:
    """Return the tree without outer names that only wrap it, such as "app"."""
    if not isinstance(tree, dict):
        return {OTHERS: tree} if not isinstance(tree, TensorLeaf) else {"value": tree}
    if set(tree) == _OF_OPTIMIZER and optimizer_in(tree) is not None:
        return {"optimizer": tree}
    for _ in range(4):
        inner = next(iter(tree.values())) if len(tree) == 1 else None
        known = isinstance(inner, dict) and any(name in inner for name in (*_MODELS, *_OPTIMIZERS))
        if not known or next(iter(tree)) in (*_MODELS, *_OPTIMIZERS):
            break
        tree = inner
    return {str(name): value for name, value in tree.items()}


def _sort(tree: Mapping[str, Any]) -> ClassifiedTree:
    named = next((name for name in _MODELS if isinstance(tree.get(name), dict) and has_leaf(tree[name])), None)
    tree, at_root = split_root(tree, keys_in(tree[named]) if named is not None else ())
    parts, flat, lone = ClassifiedTree(), {}, {}
    for name, value in tree.items():
        flat_optimizer = _FLAT_OPTIMIZER.fullmatch(name)
        optimizer = optimizer_in(value) if name in _OPTIMIZERS or _looks_like_optimizer(value) else None
        if flat_optimizer is not None:
            flat[flat_optimizer[1]] = value
        elif name == named:
            parts.model = value
        elif optimizer is not None:
            parts.optimizers[name] = optimizer
        elif isinstance(value, TensorLeaf):
            lone[name] = value
        else:
            parts.others[name] = value
    known = [name for name in parts.optimizers if name in _OPTIMIZERS]
    if len(parts.optimizers) == len(known) == 1 and "optimizer" not in tree:
        parts.optimizers = {"optimizer": parts.optimizers[known[0]]}
    _put_flat(parts, flat or at_root)
    if flat and at_root:
        parts.others["optimizer_at_root"] = at_root
    if named is None:
        parts.model = _without_prefix(lone, parts.optimizers)
    else:
        parts.others |= lone
    return parts


def _put_flat(parts: ClassifiedTree, flat: Mapping[str, Any]) -> None:
    """Add a flat optimizer as "optimizer"; as other values if it is not one or the name is taken."""
    optimizer = optimizer_in(flat) if flat else None
    if optimizer is not None and "optimizer" not in parts.optimizers:
        parts.optimizers["optimizer"] = optimizer
    elif flat:
        parts.others["optimizer"] = flat


def _looks_like_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == _OF_OPTIMIZER


def _without_prefix(tensors: dict[str, Any], optimizers: Mapping[str, OptimizerState]) -> dict[str, Any]:
    """Remove "model." from flat keys if an optimizer has the same keys without it."""
    bare = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
    params = {param for optimizer in optimizers.values() for param in optimizer.params}
    return bare if len(bare) == len(tensors) and params and params <= set(bare) else tensors
