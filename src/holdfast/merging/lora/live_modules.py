"""The modules that hold a base's tensors when transformers opens it: their names and their classes.

An adapter names modules. The keys of a file are not always those names: the head of Pythia is stored as embed_out, and
is the module lm_head. Nor does a key tell a linear layer from an embedding or a router.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.core.errors import Unsupported
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe

# Models whose files have the names of their modules: these are known without transformers.
_PLAIN_MODELS = ("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
_PLAIN = re.compile(r"model\.(layers\.[0-9]+|embed_tokens|norm)\..+|lm_head\.weight")
_PLAIN_LINEAR = re.compile(r"model\.layers\.[0-9]+\.(self_attn|mlp)\.\w+_proj\.weight|lm_head\.weight")
_REFUSED_BY_PEFT = re.compile(r"(.*\.)?(out_proj|conv1d)\.weight")  # of models with mamba in their type
_GENERATING = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class LiveModules:
    """Names of tensors in the opened model, by their keys in the base's files, and what is known of them by name.

    `linear` are the weights that PEFT adds matrices to, `transposed` those of them that are stored as [in, out].
    `savable` are tensors of modules that may stand in `modules_to_save`, `shared` those of several modules.
    """

    names: Mapping[str, str]
    linear: frozenset[str]
    transposed: frozenset[str]
    savable: frozenset[str]
    shared: frozenset[str]

    def name_of(self, key: str, where: str) -> str:
        """Return the name of a tensor. Raises Unsupported if no module has it as it is stored."""
        if key not in self.names:
            raise Unsupported(
                f"{key!r} was changed, but belongs to no module of {where} as transformers opens it: an adapter "
                "cannot hold it"
            )
        return self.names[key]


def live_modules(config: Mapping[str, Any], tensors: Mapping[str, Recipe[Place]], where: str) -> LiveModules:
    """Return the modules of a base, which transformers builds without memory. Code from the hub is never run.

    Raises Unsupported if they are not known: PEFT opens an adapter with wrong names, and leaves the model as it was.
    """
    if _is_plain(config, tensors):
        matrices = frozenset(key for key in tensors if _PLAIN_LINEAR.fullmatch(key))
        return LiveModules({key: key for key in tensors}, matrices, frozenset(), frozenset(tensors), frozenset())
    try:
        import transformers
    except ImportError:
        raise Unsupported(f"{where}: the names of its modules need transformers, which is not installed") from None
    model = _model_on_meta(transformers, config, where)
    modules = dict(model.named_modules())
    names = _names(model, {key: tuple(recipe.shape) for key, recipe in tensors.items()}, where)
    owners = {name: modules.get(name.rpartition(".")[0], model) for name in names.values()}
    kinds = {name: type(owner) for name, owner in owners.items()}
    refused = _REFUSED_BY_PEFT if "mamba" in str(config.get("model_type")) else None
    transposed = {n for n, kind in kinds.items() if kind.__name__ == "Conv1D" and n.endswith(".weight")}
    linear = {n for n, kind in kinds.items() if _is_linear(kind) and n.endswith(".weight")}
    every = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(map(id, every.values()))
    return LiveModules(
        names,
        frozenset(n for n in linear | transposed if refused is None or refused.fullmatch(n) is None),
        frozenset(transposed),
        frozenset(n for n, kind in kinds.items() if kind.__module__.startswith("torch.nn.") or "Norm" in kind.__name__),
        frozenset(n for n, parameter in every.items() if uses[id(parameter)] > 1),
    )


def task_type(config: Mapping[str, Any]) -> str | None:
    """Return PEFT's task for an adapter of a model that generates text, None for any other: PEFT then adds nothing."""
    generates = any(str(name).endswith(_GENERATING) for name in config.get("architectures") or [])
    return "CAUSAL_LM" if generates else None


def _model_on_meta(transformers: Any, config: Mapping[str, Any], where: str) -> nn.Module:
    names = config.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names and isinstance(names[0], str) else None
    model_type = config.get("model_type")
    if kind is None or model_type not in transformers.CONFIG_MAPPING:
        raise Unsupported(
            f"{where}: its config.json names no architecture of transformers (architectures: {str(names)[:80]}), so "
            "that the names of its modules are not known, which an adapter needs"
        )
    fields = {name: value for name, value in config.items() if name != "quantization_config"}
    try:
        with torch.device("meta"):
            model: nn.Module = kind._from_config(transformers.CONFIG_MAPPING[model_type].from_dict(fields))
    except Exception as error:  # noqa: BLE001  (code of other models)
        raise Unsupported(f"{where}: transformers cannot build this model: {type(error).__name__}: {error}") from None
    return model


def _is_linear(kind: type[nn.Module]) -> bool:
    """Return True for a layer whose product PEFT may add to: other subclasses of Linear are routers and the like."""
    return kind is nn.Linear or kind.__name__ == "FalconLinear"


def _names(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, str]:
    """Return the names of the tensors that from_pretrained takes as they are stored."""
    from holdfast.adapters.hub.rules import names_in_memory
    from holdfast.adapters.hub.traced_tensor import UntracedOperation

    live = {name: tuple(value.shape) for name, value in model.state_dict(keep_vars=True).items()}
    try:
        found = names_in_memory(model, shapes, live)
    except UntracedOperation as error:
        raise Unsupported(f"{where}: the names of its modules are not known: {error}") from None
    return {value.operation.key: name for name, value in found.items() if value.operation.kind == "source"}


def _is_plain(config: Mapping[str, Any], keys: Collection[str]) -> bool:
    """Return True for a text model whose keys are the names of its modules, all of which are known."""
    generates = not config.get("architectures") or task_type(config) is not None
    return generates and config.get("model_type") in _PLAIN_MODELS and all(map(_PLAIN.fullmatch, keys))
