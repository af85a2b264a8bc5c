"""Models with PEFT adapters, viewed as parts: each adapter under PEFT's own keys, the base model, its buffers.

PEFT itself says which tensors an adapter has and what they are called in its file: it is given a state dict of
empty tensors on the meta device, so that nothing is copied or gathered.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.adapters.huggingface import PlainClasses, plain_class
from holdfast.adapters.module import ModuleView, clean_key, has_peft_config, unwrap, view_module
from holdfast.core import names

_PREFIX = "base_model.model."
_PROMPTS = ("PROMPT_TUNING", "PREFIX_TUNING")  # what PEFT saves is the embedding itself
# PEFT's keys by module, made again if the keys of the state_dict or the configs change.
_KEYS: weakref.WeakKeyDictionary[nn.Module, tuple[Any, AdapterKeys]] = weakref.WeakKeyDictionary()
_CONFIGS: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[str, bytes]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """The parts of a model stored beside its adapters: the whole base, or only the buffers that training may change."""

    base: bool = False
    buffers: bool = False


@dataclass(frozen=True, slots=True)
class AdapterKeys:
    """By adapter: the keys of the module's state_dict and the keys in PEFT's file. `problem` says what PEFT cannot."""

    by_adapter: Mapping[str, Mapping[str, str]]
    problem: str = ""

    def holds(self, key: str) -> bool:
        return any(key in own for own in self.by_adapter.values())


def peft_model(module: Any) -> Any:
    """Return the model that PEFT can save as adapters, inside its wrappers; None for any other module.

    These are PeftModels, and transformers' models with `add_adapter`.
    """
    if not has_peft_config(module):
        return None
    inner = unwrap(module)
    added = getattr(inner, "_hf_peft_config_loaded", False)
    return inner if added or _is_wrapped(inner) else None


def _is_wrapped(model: Any) -> bool:
    return any(cls.__name__ == "PeftModel" and cls.__module__.startswith("peft.") for cls in type(model).__mro__)


def base_of(model: Any) -> Any:
    """Return the base model that has the config; its submodules contain the adapters."""
    return model.get_base_model() if _is_wrapped(model) else model


def adapter_keys(model: Any) -> AdapterKeys:
    """Return PEFT's keys of all adapters, or the reason why PEFT saves something else than the model's tensors."""
    state: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)
    configs = {name: repr(config) for name, config in model.peft_config.items()}
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    signature = (tuple(state), tuple(configs.items()), vocabulary)
    known = _KEYS.get(model)
    if known is None or known[0] != signature:
        known = _KEYS[model] = (signature, _find_keys(model, state))
    return known[1]


def _find_keys(model: Any, state: Mapping[str, torch.Tensor]) -> AdapterKeys:
    from peft import get_peft_model_state_dict

    raw = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    empty = {key: torch.empty(value.shape, dtype=value.dtype, device="meta") for key, value in raw.items()}
    key_of = {id(value): key for key, value in empty.items()}
    prefix = "" if _is_wrapped(model) else _PREFIX  # as transformers adds it
    out: dict[str, dict[str, str]] = {}
    for adapter, config in model.peft_config.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                found = get_peft_model_state_dict(model, state_dict=dict(empty), adapter_name=adapter)
        except Exception as error:  # noqa: BLE001  (of any PEFT method)
            return AdapterKeys({}, f"PEFT cannot list the tensors of {kind} ({type(error).__name__}: {error})")
        own: dict[str, str] = {}
        for key, value in found.items():
            stored = key_of.get(id(value)) or _prompt_key(kind, config, adapter, key, raw)
            if stored is None:
                return AdapterKeys({}, f"what PEFT saves of {kind} as {key!r} is computed from the model's tensors")
            own[clean_key(stored)] = clean_key(prefix + key)
        if not own:
            return AdapterKeys({}, f"PEFT lists no tensors of {kind}")
        out[adapter] = own
    return AdapterKeys(out)


def _prompt_key(kind: str, config: Any, adapter: str, key: str, raw: Mapping[str, torch.Tensor]) -> str | None:
    """Return the embedding that PEFT saves of a learned prompt, None if it saves what an encoder makes of it."""
    if kind not in _PROMPTS or key != "prompt_embeddings" or getattr(config, "prefix_projection", False):
        return None
    stored = f"prompt_encoder.{adapter}.embedding.weight"
    return stored if stored in raw else None


def base_key(model: Any, key: str) -> str | None:
    """Return the key of a tensor in the plain base model; None for a tensor that an adapter brought."""
    if _is_wrapped(model):
        learned = model.peft_config[model.active_adapter].is_prompt_learning
        prefix = "base_model." if learned else _PREFIX
        if not key.startswith(prefix):
            return None
        key = key.removeprefix(prefix)
        part: Any = base_of(model)
    else:
        part = model
    kept: list[str] = []
    for name in key.split("."):
        layer = _is_tuner(part)
        if layer and name in ("base_layer", "original_module", "token_adapter"):
            part = getattr(part, name, None)
            continue
        if layer:
            return None
        kept.append(name)
        part = _child(part, name)
    return ".".join(kept)


def _child(part: Any, name: str) -> Any:
    """Return a submodule or tensor by name, inside the wrappers of torch.compile and activation checkpointing."""
    while (inner := getattr(part, "_modules", {}).get("_checkpoint_wrapped_module")) is not None:
        part = inner
    child = getattr(part, name, None)
    for wrapper in ("_orig_mod", "_checkpoint_wrapped_module"):
        child = getattr(child, "_modules", {}).get(wrapper, child)
    return child


def _is_tuner(part: Any) -> bool:
    return any(cls.__name__ in ("BaseTunerLayer", "AuxiliaryTrainingWrapper") for cls in type(part).__mro__)


def merged_layer(model: Any) -> str:
    """Return the path of a layer whose base weight has an adapter merged into it, "" if there is none."""
    for path, part in model.named_modules():
        if getattr(part, "merged_adapters", None):
            return str(path)
    return ""


def adapter_views(
    name: str, module: nn.Module, ties: Mapping[str, str], parts: AdapterParts
) -> Iterator[tuple[str, ModuleView]]:
    """Yield the groups of a model with adapters and their views; the first has the extra states of the model."""
    whole, model = view_module(name, module, ties), unwrap(module)
    keys = adapter_keys(model).by_adapter
    every, extra = (*whole.tensors, *whole.extra), whole.extra
    for adapter, own in keys.items():
        stored = {peft_key: raw for raw, peft_key in own.items()}
        yield names.adapter_group(name, adapter), _part(whole, stored, names.ADAPTER, extra, every)
        extra = {}
    held = {raw for own in keys.values() for raw in own}
    plain = {raw: key for raw in whole.tensors if (key := base_key(model, raw)) is not None}
    if parts.base:
        view = _part(whole, {key: raw for raw, key in plain.items()}, names.BASE, {}, every, without=held)
        yield f"{name}.{names.BASE}", view
    # Copies are of the quantized base (scales of bitsandbytes), which the reference stands for; no load can fill them.
    left_out = {*whole.parameters, *held, *whole.copies}
    buffers = {raw: raw for raw in plain if raw not in left_out}
    if parts.buffers and buffers and not parts.base:
        yield f"{name}.{names.BUFFERS}", _part(whole, buffers, names.BUFFERS, {}, every)


def _part(
    whole: ModuleView,
    stored: Mapping[str, str],
    kind: str,
    extra: Mapping[str, Any],
    every: tuple[str, ...],
    without: set[str] | frozenset[str] = frozenset(),
) -> ModuleView:
    """Return a part of a view under other keys. Parameters `without` belong to another part, which trains them."""
    tensors = {key: whole.tensors[raw] for key, raw in stored.items()}
    parameters: dict[int, str] = {}
    for key, raw in stored.items():
        if raw in whole.parameters and raw not in without:
            parameters.setdefault(id(whole.tensors[raw]), key)
    ties: dict[str, str] = {}
    if kind == names.BASE:
        key_of = {raw: key for key, raw in stored.items()}
        ties = {key_of[a]: key_of[b] for a, b in whole.ties.items() if a in key_of and b in key_of}
    return replace(
        whole,
        tensors=tensors,
        parameters=frozenset(parameters.values()),
        ties=ties,
        extra=extra,
        copies=frozenset(key for key, raw in stored.items() if raw in whole.copies),
        kind=kind,
        raw_keys=stored,
        every_key=every,
    )


def trained_base_keys(view: ModuleView) -> list[str]:
    """Return the trainable parameters of a model that belong to none of its adapters, by their key in the model."""
    keys = adapter_keys(view.module)
    shared = {id(view.tensors[key]) for key in view.tensors if keys.holds(key)}
    return [
        key
        for key in view.parameters
        if view.tensors[key].requires_grad and not keys.holds(key) and id(view.tensors[key]) not in shared
    ]


def adapter_configs(name: str, module: nn.Module, head: str = "") -> dict[str, bytes]:
    """Return the adapter_config.json of each adapter by path, as PEFT writes it; `head` as in a group's name."""
    model: Any = unwrap(module)
    cached = _CONFIGS.setdefault(model, {})
    out = {}
    for adapter, config in model.peft_config.items():
        text = repr(config)
        if cached.get(adapter, ("", b""))[0] != text:
            cached[adapter] = (text, _write_config(model, config))
        stem = names.file_stem(head + names.adapter_group(name, adapter), names.ADAPTER)
        out[names.group_folder(stem) + names.ADAPTER_CONFIG] = cached[adapter][1]
    return out


def _write_config(model: Any, config: Any) -> bytes:
    config = copy.deepcopy(config)
    mapping = None
    if _is_wrapped(model):
        base = model.base_model if config.is_prompt_learning else model.base_model.model
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
        config.inference_mode = True
        if config.task_type is None:
            kind = plain_class(base)
            mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    for field, value in list(vars(config).items()):
        if isinstance(value, set):  # whose order differs between processes
            setattr(config, field, sorted(value))
    with tempfile.TemporaryDirectory(prefix="holdfast-adapter-") as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return (Path(folder) / names.ADAPTER_CONFIG).read_bytes()


@dataclass(frozen=True, slots=True)
class BaseTensors:
    """The parameters of a base model by its own keys, and how its folder may name them otherwise.

    `prefix` is that of the inner model of a model with a head. `renamed` means that transformers stores this model
    under other keys than it has in memory.
    """

    tensors: Mapping[str, torch.Tensor]
    prefix: str
    renamed: bool


def base_tensors(view: ModuleView) -> BaseTensors:
    """Return the parameters of the base model, without those that an adapter trains instead."""
    keys, base = adapter_keys(view.module), base_of(view.module)
    plain = {
        raw: base_key(view.module, raw)
        for raw in sorted(view.parameters)
        if not keys.holds(raw) and "original_module" not in raw.split(".")
    }
    tensors = {key: view.tensors[raw] for raw, key in plain.items() if key is not None}
    return BaseTensors(tensors, str(getattr(base, "base_model_prefix", "")), _is_renamed(base))


def _is_renamed(base: Any) -> bool:
    """Return True if transformers converts this model's keys or tensors between its folder and memory."""
    if not hasattr(base, "base_model_prefix"):
        return False
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return True  # an older transformers renames some keys elsewhere
    model: Any = PlainClasses(base)
    return bool(get_model_conversion_mapping(model, add_legacy=False))
