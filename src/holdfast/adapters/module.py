"""Modules viewed as tensors by key: wrapper names removed, tied weights, non-persistent buffers, extra state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from holdfast.adapters.subclass_tensors import is_subclass, plain_tensors
from holdfast.adapters.weight_wrappers import PLAIN, local_tensor
from holdfast.core.errors import Unsupported

_PRETRAINED = ("transformers.modeling_utils", "PreTrainedModel")
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class ModuleView:
    """A module's state: tensors by key, keys of parameters, ties and extra state.

    `outer` is the module as passed in; `module` is the module inside its wrappers. `copies` are the keys
    of tensors that the state_dict computes instead of returning the module's own. Of a model with PEFT
    adapters there are several views, each a part of its tensors: `raw_keys` are their keys in the
    module, by key of the view, and `every_key` all keys of the module.
    """

    outer: nn.Module
    module: nn.Module
    tensors: Mapping[str, torch.Tensor]
    parameters: frozenset[str]
    ties: Mapping[str, str]
    extra: Mapping[str, Any]
    copies: frozenset[str]
    kind: str = "module"
    raw_keys: Mapping[str, str] | None = None
    every_key: tuple[str, ...] = ()

    def aliases_of(self, stored: str) -> list[str]:
        return [alias for alias, key in self.ties.items() if key == stored]

    @property
    def module_keys(self) -> tuple[str, ...]:
        """All keys of the module, tensors and extra states."""
        return self.every_key or (*self.tensors, *self.extra)

    def module_key(self, key: str) -> str:
        """Return the key in the module of a key of this view."""
        return key if self.raw_keys is None else self.raw_keys.get(key, key)

    def stored_key(self, key: str) -> str:
        return self.ties.get(key, key)

    def parameter_keys(self) -> dict[int, str]:
        """Return the stored key of every parameter, by the parameter's identity."""
        return {id(self.tensors[key]): self.stored_key(key) for key in self.parameters}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, torch.compile and activation checkpointing."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif isinstance(original := getattr(module, "_orig_mod", None), nn.Module):
            module = original
        else:
            return module


def is_pretrained(module: nn.Module) -> bool:
    """Return True for a model of a transformers class; transformers need not be installed."""
    return any((cls.__module__, cls.__name__) == _PRETRAINED for cls in type(module).__mro__)


def has_peft_config(value: Any) -> bool:
    """Return True for a module whose adapters PEFT may be able to save; peft need not be installed."""
    return isinstance(value, nn.Module) and bool(getattr(unwrap(value), "peft_config", None))


def clean_key(key: str) -> str:
    """Remove the names of wrappers from a key."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def is_below(key: str, path: str) -> bool:
    """Return True if a key belongs to the submodule at a path; "" is the module itself."""
    return not path or key == path or key.startswith(f"{path}.")


def view_module(name: str, module: nn.Module, ties: Mapping[str, str]) -> ModuleView:
    """View a module's state without copying it. `ties` (alias to key) extends the ties the module declares."""
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
            raise Unsupported(f"{name}: {key} has no shape yet; run the lazy module once before saving or loading it")
        elif key in tensors:
            raise Unsupported(f"{name}: two tensors have the key {key} after wrapper names are removed")
        else:
            tensors[key] = value
    parameter_ids = {id(parameter) for parameter in inner.parameters()}
    parameters = frozenset(key for key, tensor in tensors.items() if id(tensor) in parameter_ids)
    own = {memory_identity(tensor) for tensor in (*inner.parameters(), *inner.buffers())}
    copies = frozenset(key for key, tensor in tensors.items() if memory_identity(tensor) not in own)
    return ModuleView(module, inner, tensors, parameters, _ties(inner, tensors, ties), extra, copies)


def _state_dict(name: str, module: nn.Module) -> Mapping[str, Any]:
    """Return the module's own state_dict, with its hooks and overrides."""
    kind = type(module).__name__
    try:
        state = module.state_dict(keep_vars=True)
    except TypeError as error:
        raise Unsupported(
            f"{name}: the state_dict of {kind} cannot be called with keep_vars=True, as torch's can: {error}"
        ) from error
    if not isinstance(state, Mapping):
        raise Unsupported(f"{name}: the state_dict of {kind} returns a {type(state).__name__}, not a dict")
    return state


def non_persistent_buffers(view: ModuleView) -> list[str]:
    """Return the buffers that a module's state_dict omits, so that no checkpoint contains them."""
    if view.raw_keys is not None:
        return []  # a part of a model: the base model is complete before it is loaded
    out = []
    for path, part in view.module.named_modules(remove_duplicate=False):
        for own in part._non_persistent_buffers_set:
            key = clean_key(f"{path}.{own}" if path else own)
            if part._buffers.get(own) is not None and key not in view.tensors:
                out.append(key)
    return out


def _ties(module: nn.Module, tensors: Mapping[str, torch.Tensor], explicit: Mapping[str, str]) -> dict[str, str]:
    """Map each alias to its stored key: explicit, declared by the model, or detected from shared memory."""
    ties = {**_declared_ties(module), **explicit}
    aliases = {alias: key for alias, key in ties.items() if alias in tensors}
    first: dict[object, str] = {}
    for key, tensor in tensors.items():
        if key in aliases:
            continue
        owner = first.setdefault(memory_identity(tensor), key)
        if owner != key:
            aliases[key] = owner
    return {alias: _resolve_alias(aliases, alias) for alias in aliases}


def _resolve_alias(aliases: Mapping[str, str], alias: str) -> str:
    seen = {alias}
    key = aliases[alias]
    while key in aliases and key not in seen:
        seen.add(key)
        key = aliases[key]
    return key


def memory_identity(tensor: torch.Tensor) -> object:
    """Return a value that is equal for tensors that view the same memory in the same way."""
    local = tensor
    if type(tensor) not in PLAIN:
        if is_subclass(tensor):
            return tuple(memory_identity(inner) for inner in plain_tensors(tensor))
        local = local_tensor(tensor)
    if local.numel() == 0:
        return id(tensor)
    if local.is_meta:  # without addresses; the storage tells which tensors will share memory
        storage = local.untyped_storage()._cdata
        return storage, local.storage_offset(), local.dtype, tuple(local.shape), local.stride()
    signs = local.is_conj(), local.is_neg()
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), local.device, signs


def _declared_ties(module: nn.Module) -> dict[str, str]:
    """Return the ties a Hugging Face model declares, if its config enables them."""
    config = getattr(module, "config", None)
    if config is None or not _ties_embeddings(config):
        return {}
    declared = getattr(module, "all_tied_weights_keys", None)
    if not isinstance(declared, dict):
        declared = getattr(module, "_tied_weights_keys", None)
    if not isinstance(declared, dict):
        return {}
    return {clean_key(str(alias)): clean_key(str(key)) for alias, key in declared.items() if alias != key}


def _ties_embeddings(config: Any) -> bool:
    if getattr(config, "tie_word_embeddings", False):
        return True
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "tie_word_embeddings", False))


def set_extra_state(view: ModuleView, key: str, value: Any) -> None:
    """Pass a loaded extra state to the submodule it belongs to."""
    owner = key.removesuffix(_EXTRA).rstrip(".")
    for name, child in view.module.named_modules(remove_duplicate=False):
        if clean_key(name) == owner:
            child.set_extra_state(value)
            return
    raise Unsupported(f"there is no submodule {owner!r} for the extra state {key}")
