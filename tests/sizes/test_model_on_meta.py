"""Sizes from a config.json alone, against what a save of the real model writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from tests.adapters.hub.architectures import tiny_model
from tests.sizes.test_memory_plan import CUT, on_disk

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

MODELS = ["qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "gemma3", "llava", "vit"]
QUICK = ("qwen3_moe",)


def trained(model_type: str) -> dict[str, Any]:
    model = tiny_model(model_type)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("model_type", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in MODELS])
def test_checkpoint_bytes_from_a_config(model_type: str, tmp_path: Path) -> None:
    state = trained(model_type)
    holdfast.save(tmp_path / "made", state, **CUT)
    (tmp_path / "config.json").write_bytes((tmp_path / "made" / "config.json").read_bytes())
    sources: list[Any] = [tmp_path, tmp_path / "config.json", tmp_path / "made", state["model"]]
    plans = [holdfast.plan_memory(source, optim="adamw", **CUT) for source in sources]
    assert [plan.checkpoint.bytes for plan in plans] == [on_disk(tmp_path / "made")] * len(sources)
    held = sum(parameter.numel() * parameter.element_size() for parameter in state["model"].parameters())
    assert plans[0].ranks[0].gradients == held
    assert plans[0].ranks[0].optimizer == 2 * held


def test_nothing_is_allocated_for_a_large_config(tmp_path: Path) -> None:
    fields = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "dtype": "bfloat16"},
        **{"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
        **{"num_key_value_heads": 8, "tie_word_embeddings": False, "quantization_config": {"quant_method": "fbgemm"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    plan = holdfast.plan_memory(tmp_path, dp=8, tp=8, zero=3, ranks=[])
    assert plan.model.parameters == 405_853_388_800
    assert sum(rank.parameters for rank in plan.ranks[::8]) * 8 >= 2 * plan.model.parameters
    assert any("quantization by fbgemm" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[]", InvalidArgument, "expected a JSON object"),
        ('{"model_type": "no-such-model"}', Unsupported, "transformers cannot build this model"),
        ('{"auto_map": {"AutoModel": "code.py"}, "architectures": ["Own"]}', Unsupported, "never run here"),
    ],
)
def test_configs_that_cannot_be_built(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=message):
        holdfast.plan_memory(tmp_path)


def test_a_missing_config(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        holdfast.plan_memory(tmp_path / "config.json")
