"""Embedding models open from folders with either naming of the hub, and from saved steps with their optimizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, Qwen2ForCausalLM, Qwen3ForCausalLM

import holdfast
from holdfast.train.embedding import EmbeddingSettings, open_embedding_model
from holdfast.train.embedding.open_model import open_tokenizer
from tests.train.embedding.tiny_models import TEXTS, largest_distance, make_tokenizer, write_model

SETTINGS = EmbeddingSettings(pooling="lasttoken")
WHOLE: dict[str, Any] = {"qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", WHOLE)
def test_the_names_of_whole_models_and_of_bodies(tmp_path: Path, family: str, tied: bool) -> None:
    body = write_model(tmp_path / "body", family, tie_word_embeddings=tied)
    whole, info = WHOLE[family].from_pretrained(body, output_loading_info=True)
    assert info["missing_keys"] <= {"lm_head.weight"}
    whole.save_pretrained(tmp_path / "whole")
    make_tokenizer(family).save_pretrained(tmp_path / "whole")
    keys = load_file(tmp_path / "whole" / "model.safetensors").keys()
    assert "model.norm.weight" in keys and ("lm_head.weight" in keys) == (not tied)
    ours = open_embedding_model(body, SETTINGS)
    assert torch.equal(open_embedding_model(tmp_path / "whole", SETTINGS).encode(TEXTS), ours.encode(TEXTS))
    holdfast.save(tmp_path / "step-3", ours.state(), files=ours.files())
    stored, hub = holdfast.open(tmp_path / "step-3"), load_file(body / "model.safetensors")
    assert set(stored.keys("model")) == set(hub)
    assert all(np.array_equal(stored.read(key), tensor.numpy()) for key, tensor in hub.items())
    config = json.loads((tmp_path / "step-3" / "config.json").read_text())
    assert config["architectures"] == [f"{family.capitalize()}Model"]
    opened, info = AutoModel.from_pretrained(tmp_path / "step-3", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.tensor([[7, 8, 9, 4]])
    with torch.no_grad():
        hidden = ours.encoder(ids)
        assert largest_distance(hidden[0], opened(input_ids=ids).last_hidden_state[0]) < 1e-6


@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_training_goes_on_from_a_saved_step(tmp_path: Path, family: str) -> None:
    ours = open_embedding_model(write_model(tmp_path / "hub", family), SETTINGS, compute_dtype=torch.float32)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    ours.eval()(ours.tokenize(TEXTS))[0].sum().backward()
    optimizer.step()
    state = {**ours.state(), "optimizer": optimizer}
    holdfast.save(tmp_path / "step-1", state, files=ours.files())
    again = open_embedding_model(tmp_path / "step-1").eval()
    assert torch.equal(again.encode(TEXTS), ours.encode(TEXTS))
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    holdfast.load(tmp_path / "step-1", {**again.state(), "optimizer": other})
    for model, steps in ((ours, optimizer), (again, other)):
        model.zero_grad()
        model(model.tokenize(TEXTS))[1].sum().backward()
        steps.step()
    assert torch.equal(again.encode(TEXTS), ours.encode(TEXTS))


def test_rounded_weights_become_fp32_and_activations_may_be_rounded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hub", "qwen3")
    AutoModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    exact = open_embedding_model(folder, SETTINGS)
    rounded = open_embedding_model(folder, SETTINGS, compute_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.float32}
    assert 1e-5 < largest_distance(rounded.encode(TEXTS).float(), exact.encode(TEXTS)) < 0.05


def test_the_limit_of_tokens_is_the_tokenizers_or_the_models(tmp_path: Path) -> None:
    assert open_embedding_model(write_model(tmp_path / "a", "qwen3"), SETTINGS).settings.max_length == 48
    shorter = write_model(tmp_path / "b", "bert", max_position_embeddings=20)
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    assert open_embedding_model(shorter, SETTINGS).settings.max_length == 48
    limited = EmbeddingSettings(max_length=5)
    assert open_embedding_model(shorter, limited).settings.max_length == 5


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(holdfast.NotFound, match="download the model of the hub first"):
        open_embedding_model(tmp_path / "none", SETTINGS)
    folder = write_model(tmp_path / "hub", "bert")
    with pytest.raises(holdfast.InvalidArgument, match="residual_dropout: only decoders of llama, qwen2"):
        open_embedding_model(folder, SETTINGS, residual_dropout=0.1)
    with pytest.raises(holdfast.InvalidArgument, match="recompute, compute_dtype: only decoders"):
        open_embedding_model(folder, SETTINGS, recompute=True, compute_dtype=torch.bfloat16)
    (folder / "config.json").unlink()
    with pytest.raises(holdfast.NotFound, match=re.escape("no config.json")):
        open_embedding_model(folder, SETTINGS)


def test_a_folder_without_a_model_or_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(holdfast.NotFound, match=r"none: there is no such folder with a tokenizer"):
        open_tokenizer(tmp_path / "none")
    folder = write_model(tmp_path / "hub", "bert")
    (folder / "model.safetensors").rename(folder / "kept.safetensors")
    with pytest.raises(holdfast.HoldfastError, match="hub"):
        open_embedding_model(folder, SETTINGS)
    (folder / "kept.safetensors").rename(folder / "model.safetensors")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": None}))
    with pytest.raises(holdfast.InvalidArgument, match="hub: the tokenizer has no padding token"):
        open_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{ broken")
    with pytest.raises(holdfast.InvalidArgument, match=r"cannot open a tokenizer here; expected .* found config.json"):
        open_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nothing of the kind"}))
    with pytest.raises(holdfast.InvalidArgument, match="hub: transformers cannot open"):
        open_embedding_model(folder, SETTINGS)
