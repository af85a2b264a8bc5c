"""Encoders of transformers on data-parallel ranks: one process's run on every layout, and exact resume after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.names import step_folder
from holdfast.train.embedding import EmbeddingModel, EmbeddingSettings, GradCache
from holdfast.train.embedding.losses import InfoNCE
from holdfast.train.embedding.open_model import open_encoder
from holdfast.train.embedding.trainer import encoder_replica
from holdfast.train.embedding.trainer.encoder_config import EncoderConfig
from holdfast.train.layout import Layout
from tests.dist.embedding_cases import config, finish, train_until_killed, write_data
from tests.dist.harness import Victims, run_ranks
from tests.dist.resume_cases import losses
from tests.train.embedding.tiny_models import WORDS, make_tokenizer, write_model

NEAR = 1e-5
DEADLINE_S = 240.0
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp-2": {"dp_shard": 2},
    "ddp-2": {"dp_replicate": 2},
    "zero1-2": {"dp_replicate": 2, "zero1": True},
    "fsdp-3": {"dp_shard": 3},
    "hsdp-4": {"dp_replicate": 2, "dp_shard": 2},
}
STEPS, SAVED = 6, 3
SETS: dict[str, Any] = {"train__steps": STEPS, "checkpoint__every_steps": SAVED, "train__evaluate_every": SAVED}
SETS |= {"optimizer__eps": 1e-4, "optimizer__lr": 1e-3}  # AdamW scales up gradients that are only rounding
NO_DROPOUT = {
    "bert": "{ hidden_dropout_prob = 0.0, attention_probs_dropout_prob = 0.0 }",
    "modernbert": "{ attention_dropout = 0.0, mlp_dropout = 0.0 }",
}


def _config(folder: Path, data: Path, family: str, layout: dict[str, Any], **sets: Any) -> Any:
    encoder = data.parent / family
    given: dict[str, Any] = {"data__tokenizer": f'"{encoder}"', **SETS, **sets}
    return config(folder, data, layout, encoder=encoder, **given)


def _world(layout: dict[str, Any]) -> int:
    return int(layout.get("dp_shard", 1) * layout.get("dp_replicate", 1))


def _finished(layout: dict[str, Any], settings: Any) -> list[Any]:
    world = _world(layout)
    return [finish(settings)] if world == 1 else run_ranks(world, finish, settings, deadline_s=DEADLINE_S)


def _gradients(folder: Path, layout: Layout, shares: tuple[int, ...]) -> tuple[float, float]:
    """On a rank: the loss and the gradient's norm of a step in float64 with this rank's rows."""
    found_in: Any = encoder_replica
    found_in.open_encoder = lambda *given: open_encoder(*given).double()
    hub = EncoderConfig(str(folder)).hub_config()
    replica = encoder_replica.build_encoder(str(folder), hub, layout, "cpu", seed=0)
    rank = replica.meshes.dp_rank
    model = EmbeddingModel(replica.module, EmbeddingSettings(pooling="mean"), make_tokenizer("bert")).eval()
    encode = encoder_replica.EncoderOfReplica(replica, model, torch.float32)
    rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    texts = [" ".join(WORDS[7 + number : 9 + 2 * number]) for number in range(6)]
    columns = [model.tokenize(column[rows]) for column in (texts, texts[::-1])]
    found = GradCache(encode, InfoNCE(0.2), micro_batch=2, sort=True).step(columns)
    return float(found), replica.gradient_norm()


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_process(tmp_path: Path, name: str) -> None:
    folder, layout = write_model(tmp_path / "bert", "bert"), Layout(**LAYOUTS[name])
    shares = {2: (5, 1), 3: (1, 4, 1), 4: (1, 1, 3, 1)}[layout.dp]
    (truth,) = run_ranks(1, _gradients, folder, Layout(), (6,))
    for found in run_ranks(layout.world, _gradients, folder, layout, shares, deadline_s=DEADLINE_S):
        assert found == pytest.approx(truth, rel=1e-7)


@pytest.fixture(scope="module", params=["bert", pytest.param("modernbert", marks=pytest.mark.full)])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The run of one process without dropout, whose draws depend on the ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    data = write_data(folder / "data")
    write_model(folder / request.param, request.param)
    settings = _config(folder / "alone", data, request.param, {}, model__changes=NO_DROPOUT[request.param])
    finish(settings)
    return request.param, folder


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x == "fsdp-2" else pytest.mark.full) for x in LAYOUTS])
def test_ranks_train_as_one_process_and_resume_what_it_saved(
    alone: tuple[str, Path], tmp_path: Path, name: str
) -> None:
    """With 11 rows in a batch, ranks have uneven shares of it; the second half goes on from one process's step."""
    family, folder = alone
    layout, changes = LAYOUTS[name], NO_DROPOUT[family]
    _finished(layout, _config(tmp_path / "whole", folder / "data", family, layout, model__changes=changes))
    _check_near(folder / "alone", tmp_path / "whole")
    shutil.copytree(folder / "alone", tmp_path / "later")
    shutil.rmtree(tmp_path / "later" / "checkpoints" / step_folder(STEPS))
    found = _finished(layout, _config(tmp_path / "later", folder / "data", family, layout, model__changes=changes))
    assert {start for start, _ in found} == {SAVED}
    _check_near(folder / "alone", tmp_path / "later")


def _check_near(one: Path, other: Path) -> None:
    """The losses and the weights; gradients are compared in float64, above."""
    assert losses(other) == pytest.approx(losses(one), rel=NEAR)
    first, second = (holdfast.open(path / "checkpoints" / step_folder(STEPS)) for path in (one, other))
    groups = first.contents.groups
    assert {"model", "optimizer", "loss", "ema/model"} <= groups.keys()
    for group in groups.keys() - {"random", "optimizer"}:
        for key in groups[group].tensors:
            a, b = (np.asarray(each.read(key, group), np.float64) for each in (first, second))
            assert np.linalg.norm(a - b) <= NEAR * max(np.linalg.norm(a), 1e-30), f"{group}: {key}"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_run_with_dropout_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    """The kill is in a step after the save, among its micro batches."""
    data, layout = write_data(tmp_path / "data"), LAYOUTS[name]
    write_model(tmp_path / "bert", "bert")
    whole, killed = (_config(tmp_path / part, data, "bert", layout) for part in ("whole", "killed"))
    expected = _finished(layout, whole)
    victims = Victims(_world(layout), train_until_killed, killed, SAVED + 2)
    assert victims.hear(DEADLINE_S) == ["held"] * _world(layout)
    victims.kill()
    assert sorted(losses(tmp_path / "killed")) == list(range(1, SAVED + 2))
    resumed = _finished(layout, killed)
    assert {start for start, _ in resumed} == {SAVED}
    assert [held for _, held in resumed] == [held for _, held in expected]
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert expected[0][1]["random/distinct"] != expected[1][1]["random/distinct"]
