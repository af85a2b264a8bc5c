"""The config.json of a decoder names the class in transformers, also of a body without its head."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import holdfast
from holdfast.train.models.decoder import Decoder
from holdfast.train.models.stored_config import StoredConfig
from tests.dist.train_cases import model


def test_a_body_without_a_head_is_the_base_model() -> None:
    assert StoredConfig(model("qwen3")).to_dict()["architectures"] == ["Qwen3ForCausalLM"]
    assert StoredConfig(model("qwen2"), head=False).to_dict()["architectures"] == ["Qwen2Model"]


def test_more_settings_are_written() -> None:
    content = StoredConfig(model("qwen3"), extra={"is_causal": False}).to_dict()
    assert content["is_causal"] is False and content["model_type"] == "qwen3"


def test_a_save_of_a_body_writes_the_base_model(tmp_path: Path) -> None:
    decoder = Decoder(model("qwen3", tie_word_embeddings=True), head=False)
    assert not decoder.has_head and decoder.is_last
    decoder.config.extra = {"is_causal": False}
    saved = holdfast.save(tmp_path / "body", {"model": decoder.model})
    config = json.loads((tmp_path / "body" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"] and config["is_causal"] is False
    assert "embed_tokens.weight" in saved.keys("model") and "lm_head.weight" not in saved.keys("model")
    with torch.no_grad():
        hidden = decoder(torch.zeros(2, 3, dtype=torch.int64))
    assert isinstance(hidden, torch.Tensor) and hidden.shape == (2, 3, 32)
