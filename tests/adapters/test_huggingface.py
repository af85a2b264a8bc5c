"""Config files: only of models whose keys they describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.adapters.huggingface import adapter_kind


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1))


class Adapted(nn.Module):
    """What holdfast can see of a PEFT model: a base model under another name, its config, a peft_config."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = llama()
        self.lora_A = nn.Parameter(torch.randn(2, 8))
        self.config = self.base_model.config
        self.generation_config = self.base_model.generation_config
        self.peft_config = {"default": object()}


def check_saves(tmp_path: Path, make: Any) -> None:
    """Saves warn once, write no config.json, and load into a model with the same adapters."""
    model = make()
    state = {"model": model, "ema": holdfast.EMA(model, 0.9)}
    with pytest.warns(holdfast.HoldfastWarning, match=r"model: \w+ has PEFT adapters.*no config\.json is written"):
        holdfast.save(tmp_path / "x", state)
    assert not list((tmp_path / "x").rglob("*config.json"))
    live = make()
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.zero_()
    holdfast.load(tmp_path / "x", {"model": live})
    for key, value in live.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    with holdfast.Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.warns(holdfast.HoldfastWarning, match="PEFT") as caught:
            checkpointer.save(1, state).result(60)
        assert len([one for one in caught if "PEFT" in str(one.message)]) == 1
        checkpointer.save(2, state).result(60)  # warnings are errors: it has been said
    assert not list((tmp_path / "run").rglob("*config.json"))


@pytest.mark.slow
def test_a_model_with_adapters_is_not_called_a_plain_model(tmp_path: Path) -> None:
    check_saves(tmp_path, Adapted)


def test_a_plain_model_has_its_config_and_no_warning(tmp_path: Path) -> None:
    model = llama()
    assert adapter_kind(model) == ""
    holdfast.save(tmp_path / "x", {"model": model})
    assert (tmp_path / "x" / "config.json").exists()
    model.peft_config = {}
    assert adapter_kind(model) == ""


@pytest.mark.slow
def test_peft_models_are_known(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: make setup")

    def make() -> Any:
        return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))

    def inject() -> Any:
        return peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), llama())

    def add() -> Any:
        model = llama()
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
        return model

    assert all(adapter_kind(way()) for way in (make, inject, add))
    check_saves(tmp_path, inject)  # of the others PEFT can say what their adapters are: test_peft.py
    merged = make().merge_and_unload()
    assert adapter_kind(merged) == ""
