"""Mappings by name, with real models: what is loaded and saved through them is what transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import holdfast

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more))


def moe() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8
    )
    return transformers.Qwen3MoeForCausalLM(config)


class Fused(nn.Module):
    """A model whose tensors are those of another naming."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: Any) -> None:
        super().__init__()
        self.config = config
        self.names = list(tensors)
        for number, tensor in enumerate(tensors.values()):
            self.register_parameter(f"p{number}", nn.Parameter(tensor))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        return {self.names[int(key[1:])]: value for key, value in found.items()}


def fused_of(model: Any) -> dict[str, torch.Tensor]:
    """q, k, v and gate, up of a Llama as one weight each, by torch."""
    state = {key: value.detach() for key, value in model.state_dict().items()}
    out = {}
    for key, value in state.items():
        if key.endswith("q_proj.weight"):
            parts = [state[key.replace("q_proj", name)] for name in ("q_proj", "k_proj", "v_proj")]
            out[key.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif key.endswith("gate_proj.weight"):
            parts = [state[key.replace("gate_proj", name)] for name in ("gate_proj", "up_proj")]
            out[key.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not key.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            out[key] = value
    return out


@pytest.mark.parametrize("name", ["llama-fused", "fused"])
def test_a_hub_folder_loads_into_a_fused_model_by_name(tmp_path: Path, name: str) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "hub")
    truth = fused_of(model)
    live = Fused({key: torch.zeros_like(value) for key, value in truth.items()}, model.config)
    report = holdfast.load(tmp_path / "hub", {"model": live}, mapping=name)
    assert not report.missing and not report.unexpected
    found = live.state_dict()
    assert all(torch.equal(found[key], value) for key, value in truth.items())


def test_a_fused_model_is_saved_as_transformers_opens_it(tmp_path: Path) -> None:
    model = llama()
    live = Fused(fused_of(model), model.config)
    optimizer = torch.optim.AdamW(live.parameters())
    sum(parameter.sum() for parameter in live.parameters()).backward()
    before = fused_of(model)
    holdfast.save(tmp_path / "saved", {"model": live, "optimizer": optimizer}, mapping="llama-from-fused")
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = torch.arange(12).reshape(1, 12)
    assert torch.equal(opened(tokens).logits, model(tokens).logits)
    with holdfast.Checkpointer(tmp_path / "run", mapping="llama-from-fused") as checkpointer:
        optimizer.step()
        checkpointer.save(1, {"model": live, "optimizer": optimizer}).result(60)
        stepped = {key: value.clone() for key, value in live.state_dict().items()}
        named = list(zip(live.names, live.parameters(), strict=True))
        moments = {key: optimizer.state[parameter]["exp_avg"].clone() for key, parameter in named}
        fresh = Fused({key: torch.zeros_like(value) for key, value in before.items()}, model.config)
        again = torch.optim.AdamW(fresh.parameters())
        assert checkpointer.restore({"model": fresh, "optimizer": again}) == 1
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in stepped.items())
    for key, parameter in zip(fresh.names, fresh.parameters(), strict=True):
        assert torch.equal(again.state[parameter]["exp_avg"], moments[key])
    keys = holdfast.open(tmp_path / "run" / "step-000000000001").keys("optimizer")
    assert "model.layers.0.self_attn.k_proj.weight/exp_avg" in keys


def test_stacked_experts_are_one_key_each_on_disk(tmp_path: Path) -> None:
    model = moe()
    tokens = torch.arange(12).reshape(1, 12)
    logits = model(tokens).logits
    holdfast.save(tmp_path / "saved", {"model": model}, mapping="from-stacked")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in holdfast.open(tmp_path / "saved").keys()
    opened = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.allclose(opened(tokens).logits, logits, atol=1e-6)
    model.save_pretrained(tmp_path / "hub")
    fresh = moe()
    nn.init.zeros_(fresh.lm_head.weight)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    holdfast.load(tmp_path / "hub", {"model": fresh}, mapping="stacked")
    assert torch.equal(fresh(tokens).logits, logits)


def test_averages_and_masters_follow_their_parameter(tmp_path: Path) -> None:
    model = llama(dtype="float32")
    live = Fused(fused_of(model), model.config)
    average = holdfast.EMA(live, decay=0.5)
    for parameter in live.parameters():
        parameter.data.add_(1.0)
    average.update()
    state = {"model": live, "ema": average}
    truth = {key: value.tensor.clone() for key, value in average.holdfast_averages().items()}
    holdfast.save(tmp_path / "saved", state, mapping="llama-from-fused", model_dtype="bfloat16")
    opened = holdfast.open(tmp_path / "saved")
    for group in ("model", "master_weights", "ema/model"):
        assert set(opened.keys(group)) == set(model.state_dict()), group
    fresh = Fused({key: torch.zeros_like(value) for key, value in live.state_dict().items()}, model.config)
    other = holdfast.EMA(fresh, decay=0.5)
    holdfast.load(tmp_path / "saved", {"model": fresh, "ema": other}, mapping="llama-fused")
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in live.state_dict().items())
    found = other.holdfast_averages()
    assert all(torch.equal(found[key].tensor, value) for key, value in truth.items())


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ("a -> , b", "column"),
        ("no-such-name", "did you mean|no mapping"),
        (Path("missing.map"), "missing.map"),
        ("a -> b, dtype='bfloat16'", "line 1.*src_dtype"),
        ({"model": "a -> b", "critic": "a ->"}, "column"),
    ],
)
def test_a_run_refuses_a_mapping_that_cannot_be_before_it_starts(tmp_path: Path, mapping: Any, says: str) -> None:
    with pytest.raises((holdfast.InvalidArgument, holdfast.NotFound), match=says):
        holdfast.Checkpointer(tmp_path, mapping=mapping)
