"""ModelConfig and config.json say the same, and what would be computed otherwise is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.train.models.model_config import FAMILIES, ModelConfig
from tests.dist.train_cases import model


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_tells_all_that_it_can(family: str) -> None:
    config = model(family, tie_word_embeddings=True, rope_theta=5000.0, attention_dropout=0.25)
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_of_transformers_are_read(family: str) -> None:
    """With their defaults in it, which say more than ours."""
    config = model(family)
    theirs = AutoConfig.for_model(**config.to_hf()).to_dict()
    assert replace(ModelConfig.from_hf(theirs), family=family) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_what_is_not_done_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        ModelConfig.from_hf(model("qwen3_moe").to_hf() | change)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("bert", {}, "family 'bert'"),
        ("llama", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ("llama", {"intermediate_size": 0}, "intermediate_size=0"),
        ("llama", {"head_dim": 3}, "must be even"),
        ("llama", {"residual_dropout": 1.0}, "residual_dropout=1.0"),
        ("llama", {"attention_dropout": -0.1}, "attention_dropout=-0.1"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be .* num_experts=8"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        model(family, **change)
