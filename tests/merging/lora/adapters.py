"""Small models and adapters for tests of merges, and what PEFT makes of them in memory."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 300


def llama(path: Path, dtype: torch.dtype = torch.bfloat16, *, tied: bool = False, **fields: Any) -> Path:
    """Save a Llama of two layers, sharded, with a generation config of its own."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": VOCABULARY} | fields
    config = LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, tie_word_embeddings=tied, **sizes
    )
    model: Any = LlamaForCausalLM(config)
    model = model.to(dtype)
    model.save_pretrained(path, max_shard_size="200KB")
    (path / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.5, "do_sample": true}')
    return path


def gpt2(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32)
    model: Any = GPT2LMHeadModel(config)
    model.to(dtype).save_pretrained(path)
    return path


def opened(path: Path) -> Any:
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(path, dtype="auto")


def adapter(
    base: Path, path: Path, change: Callable[[Any], None] | None = None, *, seed: int = 1, **options: Any
) -> Path:
    """Save an adapter of random numbers for a base. `change` is called with the base before the adapter is added."""
    torch.manual_seed(seed)
    model = opened(base)
    if change is not None:
        change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields: dict[str, Any] = {"r": 8, "target_modules": ["q_proj"]} | options
        tuned: Any = get_peft_model(model, LoraConfig(**fields))
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        tuned.save_pretrained(path)
    return path


def merged_by_peft(
    base: Path, *adapters: Path, change: Callable[[Any], None] | None = None, weights: tuple[float, ...] = ()
) -> dict[str, torch.Tensor]:
    """Return the state of the model that PEFT makes in memory."""
    state: dict[str, torch.Tensor] = merged_model(base, *adapters, change=change, weights=weights).state_dict()
    return state


def merged_model(
    base: Path, *adapters: Path, change: Callable[[Any], None] | None = None, weights: tuple[float, ...] = ()
) -> Any:
    model = opened(base)
    if change is not None:
        change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned: Any = PeftModel.from_pretrained(model, adapters[0], adapter_name="0")
        for number, path in enumerate(adapters[1:], 1):
            tuned.load_adapter(path, adapter_name=str(number))
        names = [str(number) for number in range(len(adapters))]
        for module in tuned.modules():
            for name, weight in zip(names, weights, strict=False):
                if hasattr(module, "set_scale") and name in module.scaling:
                    module.set_scale(name, weight)
        return tuned.merge_and_unload(adapter_names=names)


def changed_config(path: Path, **fields: Any) -> None:
    """Change fields of an adapter's config."""
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def grow(count: int) -> Callable[[nn.Module], None]:
    def change(model: Any) -> None:
        torch.manual_seed(5)
        model.resize_token_embeddings(VOCABULARY + count, mean_resizing=False)

    return change
