"""Runs of encoders of transformers in one process: their folders, what they start from, evaluation, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, BertConfig, BertForMaskedLM

from holdfast.core.errors import Mismatch
from holdfast.core.names import step_folder
from holdfast.train.embedding.trainer import EmbeddingTrainer
from holdfast.train.open_run import open_run
from tests.dist.embedding_cases import config, holds, write_data
from tests.train.embedding.tiny_models import SIZES, TEXTS, largest_distance, make_tokenizer, write_model

NEAR = 1e-6
SHORT: dict[str, Any] = {"train__steps": 2, "checkpoint__every_steps": 1, "train__micro_batch": 16}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("encoders") / "data")


def _run(folder: Path, data: Path, encoder: Path, **sets: Any) -> EmbeddingTrainer:
    trainer = EmbeddingTrainer(config(folder, data, encoder=encoder, data__tokenizer=f'"{encoder}"', **SHORT | sets))
    trainer.run()
    return trainer


def _step(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / step_folder(step)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_every_step_is_a_folder_of_sentence_transformers(tmp_path: Path, data: Path, family: str) -> None:
    encoder = write_model(tmp_path / family, family, side="left")
    trainer = _run(tmp_path / "run", data, encoder)
    for step in (1, 2):
        peer = SentenceTransformer(str(_step(tmp_path / "run", step)), device="cpu")
        for side, encode in (("query", peer.encode_query), ("document", peer.encode_document)):
            distance = largest_distance(trainer._encode(TEXTS, side), encode(TEXTS))
            assert distance < NEAR if step == 2 else distance > 1e-4
    content = json.loads((_step(tmp_path / "run", 2) / "config.json").read_text())
    assert content["matryoshka_dimensions"] == [8, 16] and content["architectures"] == [type(peer[0].model).__name__]


def test_a_resumed_run_has_the_numbers_of_one_that_went_on(tmp_path: Path, data: Path) -> None:
    """With dropout, and an evaluation in between, which draws no random numbers."""
    encoder = write_model(tmp_path / "bert", "bert")
    whole = _run(tmp_path / "whole", data, encoder, train__steps=3)
    _run(tmp_path / "parts", data, encoder, train__steps=1, train__evaluate_every=1)
    torch.manual_seed(99)
    resumed = _run(tmp_path / "parts", data, encoder, train__steps=3)
    assert holds(resumed) == holds(whole)
    other = _run(tmp_path / "other", data, encoder, train__steps=3, train__seed=1)
    assert (
        holds(other)["model/encoder.layer.0.output.dense.weight"]
        != holds(whole)["model/encoder.layer.0.output.dense.weight"]
    )


@pytest.mark.full
def test_a_run_starts_from_a_folder_of_sentence_transformers_and_ignores_heads(tmp_path: Path, data: Path) -> None:
    """`start_from` alone: sizes, weights and settings are the folder's; its MLM head is no part of the encoder."""
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(tmp_path / "mlm")
    make_tokenizer("bert").save_pretrained(tmp_path / "mlm")
    first = _run(tmp_path / "first", data, tmp_path / "mlm", embedding__normalize=False)
    text = f"""
        [embedding]
        [data]
        sets = [{{ files = ["{data}/pairs.jsonl"] }}]
        [train]
        start_from = "{_step(tmp_path / "first", 2)}"
        folder = "{tmp_path / "second"}"
        steps = 1
        global_batch = 8
        dtype = "bfloat16"
        [optimizer]
        lr = 1e-30
        weight_decay = 0.0
    """
    (tmp_path / "run.toml").write_text(text)
    settings: Any = open_run(tmp_path / "run.toml")
    assert settings.model.family == "bert" and settings.embedding.pooling == "mean"
    assert not settings.embedding.normalize and settings.embedding.prompts["query"] == "find: "
    (tmp_path / "again.toml").write_text(settings.to_toml())
    assert open_run(tmp_path / "again.toml") == settings
    second = EmbeddingTrainer(settings)
    second.run()
    rounded, exact = second._encode(TEXTS, "query"), first._encode(TEXTS, "query")
    assert 1e-5 < largest_distance(rounded.float(), exact) < 0.05
    one, two = (AutoModel.from_pretrained(_step(tmp_path / name, at)) for name, at in (("first", 2), ("second", 1)))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_weights_of_another_step_and_changed_settings(tmp_path: Path, data: Path) -> None:
    encoder = write_model(tmp_path / "bert", "bert")
    first = _run(tmp_path / "first", data, encoder)
    changes = "{ hidden_dropout_prob = 0.0, attention_probs_dropout_prob = 0.0 }"
    later: dict[str, Any] = {"train__start_from": f'"{_step(tmp_path / "first", 2)}"', "model__changes": changes}
    later |= {"optimizer__lr": "1e-30", "optimizer__weight_decay": 0.0}
    second = _run(tmp_path / "second", data, encoder, **later)
    assert largest_distance(second._encode(TEXTS, "query"), first._encode(TEXTS, "query")) < NEAR
    rows = second._columns.side(TEXTS, "query")
    assert torch.equal(second._trained.encode(rows), second._trained.encode(rows))
    assert not torch.equal(first._trained.encode(rows), first._trained.encode(rows))


def test_other_settings_of_the_encoder_are_refused_when_a_run_resumes(tmp_path: Path, data: Path) -> None:
    encoder = write_model(tmp_path / "bert", "bert")
    _run(tmp_path / "run", data, encoder)
    before = (tmp_path / "run" / "config.toml").read_text()
    _run(tmp_path / "run", data, encoder, model__changes="{ hidden_dropout_prob = 0.2 }")
    with pytest.raises(Mismatch, match="the checkpoint's model has hidden_act='gelu', not 'relu'"):
        _run(tmp_path / "run", data, encoder, model__changes='{ hidden_act = "relu" }', train__steps=3)
    changed = before.replace("changes = {}", 'changes = {"hidden_dropout_prob" = 0.2}')
    assert (tmp_path / "run" / "config.toml").read_text() == changed != before


def test_a_pooler_is_saved_as_it_was(tmp_path: Path, data: Path) -> None:
    encoder = write_model(tmp_path / "bert", "bert")
    trainer = _run(tmp_path / "run", data, encoder, optimizer__weight_decay=0.5)
    before, after = (AutoModel.from_pretrained(path) for path in (encoder, _step(tmp_path / "run", 2)))
    assert torch.equal(before.pooler.dense.weight, after.pooler.dense.weight)
    assert not torch.equal(before.embeddings.LayerNorm.weight, after.embeddings.LayerNorm.weight)
    assert not any("pooler" in key for key in trainer.replica.parameters())
