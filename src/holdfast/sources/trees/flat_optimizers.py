"""Optimizer states flattened into the root of a tree, next to the model's keys: split off from the weights.

torch's `get_optimizer_state_dict(flatten_optimizer_state_dict=True)` gives `state.<key>.exp_avg` and
`param_groups.<key>.lr`. `{**model, **optimizer}` puts them, or `state` and `param_groups` themselves, next to the
weights. Other tools write `<key>.exp_avg` or `<key>/exp_avg`. None of these is a weight of the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from holdfast.sources.trees.leaf import TensorLeaf, dotted, leaves_of
from holdfast.sources.trees.torch_optimizer import MASTERS, optimizer_in

_STATES = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "step", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "prev", "step_size", "ax", "mu", "eta", "mu_product", "exp_avg_sq_row", "exp_avg_sq_col"),
        *("exp_avg_diff", "previous_grad", "neg_pre_grad", "moment1_0", "moment2_0", "velocity_0", "master_exp_avg"),
        *("exp_avg_slow", "slow_buffer", "z", "row_var", "col_var", "variance", "moment1", "moment2"),
    }
)
_SURE = _STATES - {"step", "sum", "prev", "ax", "mu", "eta", "z", "variance"}  # never parameter names
_OPTIONS = frozenset({"lr", "betas", "eps", "weight_decay", "momentum"})
_PREFIXES = ("model.", "module.")
_ROOT = frozenset({"state", "param_groups"})
_MEGATRON = re.compile(rf"state\.(?:{'|'.join(sorted(_SURE | MASTERS))})\..+")


def split_root(tree: Mapping[str, Any], model: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a tree without the optimizer state at its root, and that state in the form of `optimizer_in`.

    `model` are keys of weights elsewhere in the tree.
    """
    if tree.keys() > _ROOT:
        nested = {name: tree[name] for name in _ROOT}
        if optimizer_in(nested) is not None:
            return {name: value for name, value in tree.items() if name not in _ROOT}, nested
    weights = {key for key, value in tree.items() if isinstance(value, TensorLeaf)} | set(model)
    weights |= {key.removeprefix(prefix) for key in weights for prefix in _PREFIXES} | _owners(tree)
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = _flat_name(key, weights)
        if name is not None and isinstance(value, TensorLeaf | int | float | str | bool | list | tuple | None):
            flat[name] = value
    if not any(name.startswith("state.") for name in flat) or optimizer_in(flat) is None:
        return dict(tree), {}
    return {key: value for key, value in tree.items() if _flat_name(key, weights) not in flat}, flat


def keys_in(value: Any) -> set[str]:
    """Return the dotted keys of all tensors in a tree."""
    return {dotted(path) for path, _ in leaves_of(value)}


def _flat_name(key: str, weights: Collection[str]) -> str | None:
    """Return a key as torch flattens it, `state.<key>.<name>` or `param_groups.<key>.<name>`; None for a weight."""
    head, _, rest = key.partition(".")
    owner, _, last = rest.rpartition(".")
    if head in _ROOT and owner and (_has_owner(owner, weights) or (head == "state" and last in _SURE)):
        return key
    if _MEGATRON.fullmatch(key):
        return key
    for mark in (".", "/"):
        owner, found, last = key.rpartition(mark)
        if found and last in (_STATES if owner in weights else ()):
            return f"state.{owner}.{last}"
    return None


def _owners(tree: Mapping[str, Any]) -> set[str]:
    """Return the parameters named by the options and the unambiguous states of an optimizer."""
    options = (key.removeprefix("param_groups.").rpartition(".") for key in tree if key.startswith("param_groups."))
    states = (key.removeprefix("state.").rpartition(".") for key in tree if key.startswith("state."))
    named = {owner for owner, _, last in options if last in _OPTIONS}
    return named | {owner for owner, _, last in states if last in _SURE}


def _has_owner(path: str, weights: Collection[str]) -> bool:
    """Return True if a path is the key of a weight or lies below one."""
    parts = path.split(".")
    return any(".".join(parts[:count]) in weights for count in range(len(parts), 0, -1))
