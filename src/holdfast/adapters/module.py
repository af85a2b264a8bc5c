"""Modules: their tensors by clean key, which of them are buffers, and which are tied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from holdfast.core.errors import Unsupported

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class ModuleView:
    """A module's state: tensors by key, the keys of its parameters, its ties, its extra state.

    `outer` is the module as it was given; `module` is inside of its wrappers.
    """

    outer: nn.Module
    module: nn.Module
    tensors: Mapping[str, torch.Tensor]
    parameters: frozenset[str]
    ties: Mapping[str, str]
    extra: Mapping[str, Any]
    copies: frozenset[str]

    def aliases_of(self, stored: str) -> list[str]:
        return [alias for alias, key in self.ties.items() if key == stored]

    def stored_key(self, key: str) -> str:
        return self.ties.get(key, key)

    def parameter_keys(self) -> dict[int, str]:
        """The stored key of every parameter, by the parameter's identity."""
        return {id(self.tensors[key]): self.stored_key(key) for key in self.parameters}


def unwrap(module: nn.Module) -> nn.Module:
    """The module under DistributedDataParallel, torch.compile and activation checkpointing."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif isinstance(original := getattr(module, "_orig_mod", None), nn.Module):
            module = original
        else:
            return module


def clean_key(key: str) -> str:
    """A key without the names that wrappers put into it."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def is_below(key: str, path: str) -> bool:
    """Whether a key belongs to the submodule at a path; "" is the module itself."""
    return not path or key == path or key.startswith(f"{path}.")


def view_module(name: str, module: nn.Module, ties: Mapping[str, str]) -> ModuleView:
    """Look at a module without copying anything. `ties` (alias to key) adds to what it declares."""
    inner = unwrap(module)
    if any(type(child).__name__ == "FullyShardedDataParallel" for child in inner.modules()):
        raise Unsupported(f"{name}: FSDP1 keeps flat parameters without keys; use fully_shard (FSDP2)")
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for raw_key, value in _state_dict(name, inner).items():
        key = clean_key(raw_key)
        if key.rsplit(".", 1)[-1] == _EXTRA:
            extra[key] = value
        elif not isinstance(value, torch.Tensor):
            raise Unsupported(f"{name}: {key} in the module's state_dict is a {type(value).__name__}, not a tensor")
        elif isinstance(value, UninitializedParameter | UninitializedBuffer):
            raise Unsupported(f"{name}: {key} has no shape yet: run the lazy module once before it is saved or loaded")
        elif key in tensors:
            raise Unsupported(f"{name}: two tensors have the key {key} once wrapper names are taken away")
        else:
            tensors[key] = value
    parameter_ids = {id(parameter) for parameter in inner.parameters()}
    parameters = frozenset(key for key, tensor in tensors.items() if id(tensor) in parameter_ids)
    own = {memory_identity(tensor) for tensor in (*inner.parameters(), *inner.buffers())}
    copies = frozenset(key for key, tensor in tensors.items() if memory_identity(tensor) not in own)
    return ModuleView(module, inner, tensors, parameters, _ties(inner, tensors, ties), extra, copies)


def _state_dict(name: str, module: nn.Module) -> Mapping[str, Any]:
    """The module's own state_dict, with its hooks and overrides."""
    kind = type(module).__name__
    try:
        found = module.state_dict(keep_vars=True)
    except TypeError as error:
        raise Unsupported(
            f"{name}: the state_dict of {kind} cannot be called as torch's, with keep_vars=True: {error}"
        ) from error
    if not isinstance(found, Mapping):
        raise Unsupported(f"{name}: the state_dict of {kind} gives a {type(found).__name__}, not a dict")
    return found


def non_persistent_buffers(view: ModuleView) -> list[str]:
    """The buffers of a module that its state_dict leaves out, so that no checkpoint holds them."""
    out = []
    for path, part in view.module.named_modules(remove_duplicate=False):
        for own in part._non_persistent_buffers_set:
            key = clean_key(f"{path}.{own}" if path else own)
            if part._buffers.get(own) is not None and key not in view.tensors:
                out.append(key)
    return out


def _ties(module: nn.Module, tensors: Mapping[str, torch.Tensor], told: Mapping[str, str]) -> dict[str, str]:
    """Alias to the key it is stored under: told, declared by the model, or seen in shared memory."""
    ties = {**_declared_ties(module), **told}
    aliases = {alias: key for alias, key in ties.items() if alias in tensors}
    first: dict[object, str] = {}
    for key, tensor in tensors.items():
        if key in aliases:
            continue
        owner = first.setdefault(memory_identity(tensor), key)
        if owner != key:
            aliases[key] = owner
    return {alias: _follow(aliases, alias) for alias in aliases}


def _follow(aliases: Mapping[str, str], alias: str) -> str:
    seen = {alias}
    key = aliases[alias]
    while key in aliases and key not in seen:
        seen.add(key)
        key = aliases[key]
    return key


def memory_identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are one and the same memory."""
    from torch.distributed.tensor import DTensor

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0 or local.is_meta:
        return id(tensor)
    signs = local.is_conj(), local.is_neg()
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), local.device, signs


def _declared_ties(module: nn.Module) -> dict[str, str]:
    """The ties a Hugging Face model declares, when its config says they hold."""
    config = getattr(module, "config", None)
    if config is None or not _says_tied(config):
        return {}
    declared = getattr(module, "all_tied_weights_keys", None)
    if not isinstance(declared, dict):
        declared = getattr(module, "_tied_weights_keys", None)
    if not isinstance(declared, dict):
        return {}
    return {clean_key(str(alias)): clean_key(str(key)) for alias, key in declared.items() if alias != key}


def _says_tied(config: Any) -> bool:
    if getattr(config, "tie_word_embeddings", False):
        return True
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "tie_word_embeddings", False))


def set_extra_state(view: ModuleView, key: str, value: Any) -> None:
    """Hand a loaded extra state to the submodule it belongs to."""
    owner = key.removesuffix(_EXTRA).rstrip(".")
    for name, child in view.module.named_modules(remove_duplicate=False):
        if clean_key(name) == owner:
            child.set_extra_state(value)
            return
    raise Unsupported(f"no submodule {owner!r} takes the extra state {key}")
