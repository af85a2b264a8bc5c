"""Collect everything this rank saves from live objects."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.adapters.huggingface import adapter_kind, config_files
from holdfast.adapters.live_state import LiveState
from holdfast.adapters.loading.load_hooks import check_optimizer_save
from holdfast.adapters.module import memory_identity, view_module
from holdfast.adapters.optimizer import DeclaresShards, group_options, key_of_param, view_optimizer
from holdfast.adapters.optimizer_options import option_groups
from holdfast.adapters.saving.collected import Collected
from holdfast.adapters.tensors import Holders
from holdfast.adapters.tree import Tree, flatten
from holdfast.format import statejson
from holdfast.format.dtypes import DType, model_dtype_named
from holdfast.format.names import masters_group


def collect(live: LiveState, model_dtype: str | None, holders: Holders | None = None) -> Collected:
    """Collect everything this rank holds; tensors of stateful objects follow once their axes are known.

    `holders` caches the layouts of tensors from earlier saves.
    """
    out = Collected(
        owners=live.own_owners(), live_optimizers=list(live.optimizers.values()), holders=holders or Holders()
    )
    target = model_dtype_named(model_dtype)
    for name in live.modules:
        _collect_module(out, live, name, target)
    for name, optimizer in live.optimizers.items():
        _collect_optimizer(out, live, name, optimizer)
    out.fixed = len(out.items)
    for name in live.averages:
        _collect_averages(out, live, name)
    collect_values(out, live)
    return out


def collect_values(out: Collected, live: LiveState) -> None:
    """Collect the values that are neither modules nor optimizers."""
    for name, value in live.trees.items():
        tree = flatten(name, value)
        out.kinds[name] = "tensors"
        for key, tensor in tree.tensors.items():
            out.add(name, key, "value", tensor)
        out.trees[name], out.tree_kinds[name] = Tree(tree.value), "tensors"
    for name, stateful in live.statefuls.items():
        out.trees[name], out.tree_kinds[name] = flatten(name, stateful.state_dict()), "stateful"
    for name, value in live.values.items():
        out.trees[name], out.tree_kinds[name] = Tree(statejson.encode(value, name)), "json"


def _collect_module(out: Collected, live: LiveState, name: str, target: DType | None) -> None:
    view = live.modules[name]
    out.kinds[name] = "module"
    out.aliases[name] = dict(view.ties)
    seen: set[tuple[str, object]] = set()
    for key, tensor in view.tensors.items():
        stored = view.stored_key(key)
        if (stored, memory_identity(tensor)) in seen:
            continue
        seen.add((stored, memory_identity(tensor)))
        role = "parameter" if key in view.parameters else "buffer"
        rounds = target is not None and role == "parameter" and tensor.dtype == torch.float32
        out.add(name, stored, role, tensor, target if rounds else None)
        if rounds:
            out.kinds[masters_group(name)] = "masters"
            out.add(masters_group(name), stored, role, tensor)
    if view.extra:
        out.trees[name], out.tree_kinds[name] = flatten(name, dict(view.extra)), "module"
    out.plans |= plan_of(name, view.module)
    if name == "model":
        out.files |= model_files(view.module, target.name if target else None)
        kind = adapter_kind(view.module)
        if kind:
            out.notices.append(
                f"{name}: {kind} has PEFT adapters, so its keys differ from the plain model's: no config.json is "
                "written, and from_pretrained cannot open this checkpoint. holdfast.load can, into a model with the "
                "same adapters. For from_pretrained, save merge_and_unload(), or save the adapters with "
                "save_pretrained"
            )


def plan_of(name: str, module: Any) -> dict[str, Any]:
    """Return the plan of `holdfast.spmd.distribute` for a module as JSON values, under the module's name."""
    plan = getattr(module, "holdfast_plan", None)
    return {name: plan} if isinstance(plan, dict) else {}


def model_files(module: Any, model_dtype: str | None) -> dict[str, bytes]:
    """Return the config files of a model that is stored as `model_dtype`, or in its own dtype."""
    target = model_dtype_named(model_dtype)
    return config_files(module, target.name if target else None)


def _collect_averages(out: Collected, live: LiveState, name: str) -> None:
    value, group = live.averages[name], live.averages_group(name)
    view = view_module(name, value.model, {})
    out.kinds[group] = "module"
    out.aliases[group] = dict(view.ties)
    for key, tensor in value.holdfast_averages().items():
        out.add(group, key, "state" if key in view.parameters else "buffer", tensor)
    out.trees[name], out.tree_kinds[name] = Tree(statejson.encode(value.holdfast_count(), name)), "averages"
    if group == f"{name}/model":
        files = config_files(view.module, "float32")
        out.files |= {f"{name}/{file}": data for file, data in files.items()}


def _collect_optimizer(out: Collected, live: LiveState, name: str, optimizer: Any) -> None:
    if not isinstance(optimizer, DeclaresShards):
        check_optimizer_save(name, optimizer)
    module, key_of = live.parameter_keys(optimizer)
    view = view_optimizer(name, optimizer, key_of)
    out.kinds[name] = "optimizer"
    for key, value in view.tensors:
        out.add(name, key, "state", value)
    known_masters = {item.key for item in out.items if item.group == masters_group(module)}
    for key, value in view.masters:
        out.kinds[masters_group(module)] = "masters"
        if key not in known_masters:
            out.add(masters_group(module), key, "state", value)
    keys = [[key_of_param(name, param, key_of) for param in params] for params, _ in group_options(optimizer)]
    with_state = {key.rpartition("/")[0] for key, _ in view.tensors} | set(view.scalars)
    with_state |= {key for key, _ in view.masters}
    out.optimizers[name] = {
        "groups": option_groups(optimizer, name, keys),
        "stateless": [] if view.declared else [key for key, _ in view.params if key not in with_state],
        "scalars": {key: statejson.encode(value, f"{name}[{key}]") for key, value in view.scalars.items()},
        "masters": view.master_name if view.masters else None,
    }
