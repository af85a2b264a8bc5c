"""Tiny models of every family, as transformers builds and stores them, and mappings run on their tensors."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping as Dict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.mapping.program import Mapping
from holdfast.mapping.syntax.statement import Sized
from holdfast.plan.recipe import Recipe, is_filled, to_target_dims

State = dict[str, torch.Tensor]

_SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
_LATENT = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 0,
}
_GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 10, "vocab_size": 32}

# name of the case -> config class, its options. The family is told by config.json alone.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SMALL),
    "llama with biases, tied": (
        "LlamaConfig",
        {**_SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", _SMALL),
    "qwen2 tied": ("Qwen2Config", {**_SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_SMALL, "head_dim": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_SMALL, **_EXPERTS, "head_dim": 8, "num_experts": 4}),
    "qwen3-moe with dense layers": (
        "Qwen3MoeConfig",
        {**_SMALL, **_EXPERTS, "head_dim": 8, "num_experts": 4, "mlp_only_layers": [1]},
    ),
    "mixtral": ("MixtralConfig", {**_SMALL, "num_local_experts": 4}),
    "deepseek-v3": ("DeepseekV3Config", {**_SMALL, **_EXPERTS, **_LATENT}),
    "gpt2": ("GPT2Config", {**_GPT2, "bos_token_id": 0, "eos_token_id": 1}),
}


@dataclass(frozen=True)
class Stored:
    """A model on disk: its config.json and its tensors; and the state it has in memory."""

    config: dict[str, Any]
    tensors: State
    live: State


@cache
def stored(case: str) -> Stored:
    """What `save_pretrained` writes for the model of a case, every element random."""
    config_class, options = CASES[case]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**options))
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    model = model.to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        config = json.loads((Path(folder) / "config.json").read_text())
    return Stored(config, tensors, {key: value.detach() for key, value in model.state_dict().items()})


def mapping_of(name: str, config: Dict[str, Any] | None, keys: Any = None) -> Mapping:
    mapping = Mapping.parse(name, config, keys)
    assert Mapping.parse(str(mapping)) == mapping
    return mapping


def mapped(mapping: Mapping, tensors: State, **options: Any) -> State:
    """What a mapping makes of tensors, without knowing what is wanted."""
    compiled = mapping.compile({key: sized(tensor) for key, tensor in tensors.items()}, None, **options)
    return {key: made(recipe, tensors) for key, recipe in compiled.recipes.items()}


def sized(tensor: torch.Tensor) -> Sized:
    return Sized(tuple(tensor.shape), dtype_named(str(tensor.dtype).removeprefix("torch.")))


def made(recipe: Recipe[str], tensors: State) -> torch.Tensor:
    """A tensor as its recipe says."""
    assert is_filled(recipe)
    out = torch.empty(recipe.shape, dtype=getattr(torch, recipe.dtype.name))
    for term in recipe.terms:
        part = tensors[term.source][term.part.within(Box.full(tuple(tensors[term.source].shape)))]
        for dtype in term.casts:
            part = part.to(getattr(torch, dtype.name))
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[part.element_size()]
        data = torch.from_numpy(to_target_dims(part.contiguous().view(bits).numpy(), term.order).copy()).view(
            part.dtype
        )
        out[term.box.within(Box.full(recipe.shape))] = data
    return out


def assert_same(got: State, expected: State) -> None:
    """Same keys, same shapes, same dtypes, same bytes."""
    assert sorted(got) == sorted(expected)
    for key, tensor in expected.items():
        assert got[key].shape == tensor.shape, key
        assert got[key].dtype == tensor.dtype, key
        assert torch.equal(got[key].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key
