"""holdfast.load takes Paddle's checkpoints straight into torch's modules and optimizers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import holdfast
from holdfast.sources import open_stored
from tests.sources.paddle.folders import GOLDEN


def fresh(name: str) -> dict[str, Any]:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), betas=(0.5, 0.5))}


@pytest.mark.parametrize(
    ("name", "step"),
    [("llama_bf16_hf", 0), ("llama_fp32_hf", 2), ("shard2_fp32_hf", 1), ("shard2_fp32_nonmerge", 1)],
)
def test_model_and_optimizer_are_those_of_the_files(name: str, step: int) -> None:
    state, stored = fresh(name), open_stored(GOLDEN / name)
    report = holdfast.load(GOLDEN / name, state)
    assert not report.missing and not report.unexpected
    weights = "master_weights" if "master_weights" in stored.groups else "model"
    for key, parameter in state["model"].named_parameters():
        own = state["optimizer"].state[parameter]
        assert np.array_equal(parameter.detach().numpy(), stored.read(key, weights)), key
        assert np.array_equal(own["exp_avg"].numpy(), stored.read(f"{key}/moment1_0")), key
        assert np.array_equal(own["exp_avg_sq"].numpy(), stored.read(f"{key}/moment2_0")), key
        assert own["step"] == step
    assert state["optimizer"].param_groups[0]["betas"] == (0.9, 0.999)


def test_training_goes_on_from_there() -> None:
    state = fresh("shard2_fp32_hf")
    holdfast.load(GOLDEN / "shard2_fp32_hf", state)
    tokens = torch.arange(16).reshape(1, 16)
    state["model"](input_ids=tokens, labels=tokens).loss.backward()
    state["optimizer"].step()
    assert all(own["step"] == 2 for own in state["optimizer"].state.values())
