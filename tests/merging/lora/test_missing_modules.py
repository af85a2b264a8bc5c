"""Modules that an adapter must have tensors for, beside those that PEFT chooses."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from holdfast.core.errors import Mismatch
from holdfast.merging.lora.adapter_config import LoraConfig
from holdfast.merging.lora.merge_lora_call import merge_lora
from holdfast.merging.lora.missing_modules import missing_modules
from tests.merging.lora import adapters
from tests.merging.lora.test_tied_head import check_merged, with_random_adapter

KEYS = [
    *(f"encoder.layers.{layer}.blocks.{block}.query" for layer in range(2) for block in range(2)),
    *(f"model.layers.{layer}.self_attn.{name}" for layer in range(3) for name in ("q_proj", "v_proj")),
    "layers.0.q_proj",
]


class Matrix:
    shape = (4, 4)


def lacks(
    fields: dict[str, Any], keys: Collection[str], adapted: Collection[str], *whole: str, **model: Any
) -> list[str]:
    data = json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8, **fields}).encode()
    tensors: Any = {f"{key}.weight": Matrix() for key in keys}
    return list(missing_modules(LoraConfig.read(data, "config"), model, tensors, adapted, whole, str))


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["query"], "layers_to_transform": [0], "layers_pattern": "blocks"},
        {"target_modules": ["query"], "layers_to_transform": [1], "layers_pattern": ["none", "layers"]},
        {"target_modules": ["q_proj", "query"], "layers_to_transform": 1},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.v_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["query"], "layers_to_transform": [0], "layers_pattern": "block."},
        {"target_modules": ["v_proj", "q_proj"], "modules_to_save": ["q_proj"]},
    ],
)
def test_the_modules_that_peft_chooses_are_complete(fields: dict[str, Any]) -> None:
    config = peft.LoraConfig(**fields)
    chosen = [key for key in KEYS if check_target_module_exists(config, key) is True]
    assert chosen
    saved = [f"{key}.weight" for key in KEYS if "modules_to_save" in fields and key.endswith("q_proj")]
    assert not lacks(fields, KEYS, chosen, *saved)
    patterns = fields.get("layers_pattern") == "block." or isinstance(fields.get("exclude_modules"), str)
    assert patterns or lacks(fields, KEYS, chosen[1:], *saved)


@pytest.mark.parametrize(
    ("key", "model"),
    [
        ("mtp.layers.0.self_attn.q_proj", {}),
        ("model.layers.3.self_attn.q_proj", {"num_hidden_layers": 3}),
        ("model.layers.3.self_attn.q_proj", {"text_config": {"num_hidden_layers": 3}}),
    ],
)
def test_layers_that_are_not_opened_are_not_expected(key: str, model: dict[str, Any]) -> None:
    chosen = [key for key in KEYS if key.endswith("q_proj")]
    assert not lacks({"target_modules": ["q_proj"]}, [*KEYS, key], chosen, **model)
    assert lacks({"target_modules": ["q_proj"]}, KEYS, chosen[2:], **model)
    assert not lacks({"modules_to_save": ["q_proj"]}, [*KEYS, key], [], *(f"{name}.weight" for name in chosen), **model)


def test_a_norm_of_a_vision_tower_is_not_expected() -> None:
    fields = {"modules_to_save": ["norm"]}
    assert not lacks(fields, ["model.norm", "visual.merger.norm"], [], "model.norm.weight")
    assert lacks(fields, ["model.norm"], [])
    assert lacks(fields, ["model.norm"], [], "model.norm.bias")


def test_thousands_of_modules_are_checked_in_a_moment() -> None:
    keys = [f"model.layers.{n // 100}.mlp.experts.{n % 100}.up_proj" for n in range(8000)]
    start = time.process_time()
    assert not lacks({"target_modules": keys}, keys, keys)
    assert time.process_time() - start < 3


def test_a_model_with_a_layer_that_transformers_leaves_out(tmp_path: Path) -> None:
    """GLM stores a layer that predicts several tokens past the others."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    experts: dict[str, Any] = {
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    config = Glm4MoeConfig(**{**sizes, **experts, "vocab_size": 64, "head_dim": 8, "num_hidden_layers": 2})
    base, added = tmp_path / "base", tmp_path / "adapter"
    wanted = with_random_adapter(
        Glm4MoeForCausalLM(config), base, added, target_modules=["q_proj"], modules_to_save=["norm"]
    )
    tensors = load_file(base / "model.safetensors")
    tensors |= {key.replace("layers.1.", "layers.46."): value.clone() for key, value in tensors.items()}
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    merge_lora(added, tmp_path / "merged", base=base)
    check_merged(Glm4MoeForCausalLM, tmp_path / "merged", wanted)


def test_an_excluded_pattern_is_no_missing_module(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base", torch.float32)
    added = adapters.adapter(
        base, tmp_path / "adapter", target_modules="all-linear", exclude_modules=r".*layers\.1\.mlp.*"
    )
    merge_lora(added, tmp_path / "merged", base=base)
    wanted = adapters.merged_by_peft(base, added)
    found = adapters.opened(tmp_path / "merged").state_dict()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    adapters.changed_config(added, exclude_modules=None)
    with pytest.raises(Mismatch, match="for which the adapter has no matrices"):
        merge_lora(added, tmp_path / "other", base=base)
