"""Tiny Llamas with PEFT adapters on a base in a folder, and their training, for the tests of adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
TASK: dict[str, Any] = {"task_type": "CAUSAL_LM"}
TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], **TASK}


def write_base(folder: Path, seed: int = 0, **sizes: Any) -> Path:
    """Write a base model as save_pretrained does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).save_pretrained(folder)
    return folder


def open_base(folder: Path, **options: Any) -> Any:
    from transformers import LlamaForCausalLM

    model_class: Any = LlamaForCausalLM
    return model_class.from_pretrained(folder, **options)


def configs() -> dict[str, Any]:
    """Return PEFT configs by the name of the case."""
    import peft

    return {
        "lora": peft.LoraConfig(r=4, **TARGETS),
        "dora": peft.LoraConfig(r=4, use_dora=True, **TARGETS),
        "head": peft.LoraConfig(r=4, modules_to_save=["lm_head"], **TARGETS),
        "rows": peft.LoraConfig(r=4, trainable_token_indices=[1, 5], **TARGETS),
        "no task": peft.LoraConfig(r=4, target_modules=["q_proj"]),
        "embeddings": peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], **TASK),
        "biases": peft.LoraConfig(r=4, bias="all", **TARGETS),
        "ia3": peft.IA3Config(**TASK),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
        "prefix": peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
        "vera": peft.VeraConfig(r=4, **TARGETS),
        "loha": peft.LoHaConfig(r=4, **TARGETS),
        "norms": peft.LNTuningConfig(**TASK),
    }


def adapted(base: Any, *cases: str, seed: int = 1) -> Any:
    """Return a PEFT model: the first case is the adapter "default", others have the name of their case; all train."""
    import peft

    torch.manual_seed(seed)
    model = peft.get_peft_model(base, copy.deepcopy(configs()[cases[0]]))
    for case in cases[1:]:
        model.add_adapter(case, copy.deepcopy(configs()[case]))
    if len(cases) > 1:
        model.base_model.set_adapter(["default", *cases[1:]])
    return model


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([own for own in model.parameters() if own.requires_grad], lr=1e-2)


def train_step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> str:
    """Train on the batch of a step; returns the loss as float.hex."""
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 8), generator=torch.Generator().manual_seed(number))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item()).hex()


def quantized(base: Any, kind: str) -> Any:
    """Quantize the linear layers of a base model in place, but for its head, and return it."""
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(base.model, Int8WeightOnlyConfig())
        return base
    from bitsandbytes import nn

    layers: Any = nn
    for module in list(base.model.modules()):
        for name, linear in list(module.named_children()):
            if type(linear) is torch.nn.Linear:
                make = layers.Linear4bit if kind == "nf4" else layers.Linear8bitLt
                options = {"quant_type": "nf4"} if kind == "nf4" else {"has_fp16_weights": False}
                weights = layers.Params4bit if kind == "nf4" else layers.Int8Params
                made = make(linear.in_features, linear.out_features, bias=False, **options)
                made.weight = weights(linear.weight.data, requires_grad=False, **options)
                setattr(module, name, made.to("cpu"))  # which quantizes it
    base.is_loaded_in_4bit, base.is_loaded_in_8bit = kind == "nf4", kind != "nf4"
    return base
