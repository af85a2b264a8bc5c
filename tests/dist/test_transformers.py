"""The checkpoint is the model: transformers opens what FSDP2 x TP saved, as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import holdfast
from tests.dist.harness import run_ranks

TOKENS = torch.arange(24).reshape(2, 12) * 5 % 97


def build(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def _save(path: str, tied: bool) -> list[list[list[float]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(tied)
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(2):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh["tp"], plan)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    holdfast.save(path, {"model": model, "optimizer": optimizer}, step=1)
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.tolist()


@pytest.mark.sliced(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_from_pretrained_gives_the_live_models_logits(tmp_path: Path, tied: bool) -> None:
    live = torch.tensor(run_ranks(4, _save, str(tmp_path / "model"), tied)[0])
    model_class: Any = AutoModelForCausalLM
    model, info = model_class.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(model) is LlamaForCausalLM
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    with torch.no_grad():
        opened = model.eval()(input_ids=TOKENS).logits
        truth = build(tied)(input_ids=TOKENS).logits
    assert torch.equal(opened, truth), "the weights are bit for bit those of the model"
    torch.testing.assert_close(opened, live, rtol=1e-5, atol=1e-6)
    for (key, value), (other, expected) in zip(
        model.state_dict().items(), build(tied).state_dict().items(), strict=True
    ):
        assert key == other and torch.equal(value, expected)


def test_config_files_are_those_of_save_pretrained(tmp_path: Path) -> None:
    model = build(True)
    model.save_pretrained(tmp_path / "theirs")
    holdfast.save(tmp_path / "ours", {"model": model})
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
