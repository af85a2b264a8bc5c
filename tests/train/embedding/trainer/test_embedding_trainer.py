"""A run of an embedding model in one process: what it saves, where it starts from, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.core.names import step_folder
from holdfast.train.embedding import open_embedding_model
from holdfast.train.embedding.trainer import EmbeddingTrainer, parse_embedding_config
from holdfast.train.embedding.trainer.loss_settings import LossConfig
from holdfast.train.metrics import read_metrics
from tests.dist.embedding_cases import config, write_data
from tests.train.embedding.tiny_models import TEXTS, largest_distance

NEAR = 1e-6
SHORT: dict[str, Any] = {"train__steps": 2, "checkpoint__every_steps": 1, "train__micro_batch": 16}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("embedding") / "data")


def _step(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / step_folder(step)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EmbeddingTrainer]:
    folder = tmp_path_factory.mktemp("embedding") / "run"
    trainer = EmbeddingTrainer(config(folder, data, train__evaluate_every=1, **SHORT))
    trainer.run()
    return folder, trainer


def test_sentence_transformers_opens_every_step_with_the_vectors_of_the_run(
    run: tuple[Path, EmbeddingTrainer],
) -> None:
    folder, trainer = run
    for step in (1, 2):
        peer = SentenceTransformer(str(_step(folder, step)), device="cpu")
        for side, encode in (("query", peer.encode_query), ("document", peer.encode_document)):
            distance = largest_distance(trainer._encode(TEXTS, side), encode(TEXTS))
            assert distance < NEAR if step == 2 else distance > 1e-4
    assert json.loads((_step(folder, 2) / "config.json").read_text())["matryoshka_dimensions"] == [8, 16]


def test_metrics_have_set_temperature_and_measures(run: tuple[Path, EmbeddingTrainer]) -> None:
    steps, events = read_metrics(run[0] / "metrics.jsonl")
    assert {step["set"] for step in steps} <= {"pairs", "lists"}
    assert steps[0]["temperature"] != steps[1]["temperature"] and steps[1]["consumed_samples"] == 22
    measured = [event for event in events if event["event"] == "evaluated"]
    assert len(measured) == 2 and 0 <= measured[0]["lists/ndcg@10"] <= 1 and "ema_graded/spearman" in measured[0]


def test_a_run_starts_from_a_step_with_its_sizes_and_settings(
    run: tuple[Path, EmbeddingTrainer], data: Path, tmp_path: Path
) -> None:
    start = _step(run[0], 2)
    settings = parse_embedding_config(
        {
            "embedding": {"normalize": False},
            "data": {"sets": [{"files": [str(data / "pairs.jsonl")]}]},
            "train": {"start_from": str(start), "folder": str(tmp_path / "run"), "steps": 1, "global_batch": 8},
            "optimizer": {"lr": 1e-30, "weight_decay": 0.0},
        }
    )
    assert settings.model.hidden_size == 16 and settings.model.attention_dropout == 0.1
    trainer = EmbeddingTrainer(settings)
    assert trainer.settings.pooling == "mean" and not trainer.settings.causal and not trainer.settings.normalize
    trainer.run()
    ours = open_embedding_model(_step(tmp_path / "run", 1)).encode(TEXTS, "query")
    theirs = open_embedding_model(start).encode(TEXTS, "query")
    assert largest_distance(torch.nn.functional.normalize(ours), theirs) < NEAR


def test_other_vectors_are_refused_when_a_run_resumes(run: tuple[Path, EmbeddingTrainer], data: Path) -> None:
    before = (run[0] / "config.toml").read_text()
    with pytest.raises(Mismatch, match="pooling='mean', not 'cls'"):
        EmbeddingTrainer(config(run[0], data, embedding__pooling="cls", **SHORT)).run()
    assert (run[0] / "config.toml").read_text() == before


def test_dropout_differs_by_column_and_step(run: tuple[Path, EmbeddingTrainer]) -> None:
    make = run[1]._columns.batch
    keys = [column["dropout_keys"].tolist() for step in (1, 2) for column in make([TEXTS, TEXTS], step, 7)]
    assert len({key for column in keys for key in column}) == 4 * len(TEXTS)
    assert make([TEXTS], 1, 8)[0]["dropout_keys"].tolist()[:-1] == keys[0][1:]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "", "positive": "cat"}, "rows.jsonl:13"),
        ({"query": "a cat"}, "rows.jsonl:13"),
        ({"query": "a cat", "positive": "dog", "label": float("nan")}, "rows.jsonl:13"),
    ],
)
def test_bad_rows_are_named_before_anything_is_written(
    data: Path, tmp_path: Path, row: dict[str, object], message: str
) -> None:
    good = [{"query": f"q {number}", "positive": f"p {number}", "label": 1} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*good, row]))
    sets = f'[{{files = ["{tmp_path / "rows.jsonl"}"]}}]'
    with pytest.raises(InvalidArgument, match=message):
        EmbeddingTrainer(config(tmp_path / "run", data, data__sets=sets))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"embedding__dims": "[8, 17]"}, "dims=17 is more than the 16 numbers"),
        ({"model__vocab_size": 16}, "has 20 tokens, but model.vocab_size=16"),
        ({"loss": {"kind": "cosent"}}, "the rows have no 'label', which the loss needs"),
        ({"train__global_batch": 1}, "use a larger batch"),
    ],
)
def test_what_cannot_be_trained_is_refused(data: Path, tmp_path: Path, sets: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in sets.items() if name != "loss"}
    settings = config(tmp_path / "run", data, **given)
    if "loss" in sets:
        settings = replace(settings, loss=LossConfig("cosent"))
    with pytest.raises(InvalidArgument, match=message):
        EmbeddingTrainer(settings)
    assert not (tmp_path / "run").exists()
