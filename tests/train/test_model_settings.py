"""The same tensors under other settings are another model, and are not taken for the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.train.loop import Trainer
from holdfast.train.model_settings import ModelIdentity, check_same_model
from tests.dist.resume_cases import config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    Trainer(config(folder, {}, train__steps=1)).run()
    return folder


OTHERS: list[dict[str, Any]] = [
    {"model__num_attention_heads": 2, "model__num_key_value_heads": 1, "model__head_dim": 8},
    {"model__rope_theta": 5000.0},
    {"model__rms_norm_eps": 1e-3},
]


@pytest.mark.parametrize("other", OTHERS, ids=min)
def test_a_run_does_not_go_on_with_another_model_whose_tensors_fit(run: Path, other: dict[str, Any]):
    before = (run / "config.toml").read_text()
    name = min(other, key=lambda name: "head" not in name).removeprefix("model__")
    with pytest.raises(holdfast.Mismatch, match=f"the checkpoint's model has .*{name}="):
        Trainer(config(run, {}, train__steps=2, **other)).run()
    assert (run / "config.toml").read_text() == before, "a run that was refused leaves the config of the one there"


@pytest.mark.parametrize("other", OTHERS, ids=min)
def test_nor_does_it_begin_with_the_weights_of_one(run: Path, tmp_path: Path, other: dict[str, Any]):
    stored = run / "checkpoints" / "step-000000000001"
    with pytest.raises(holdfast.Mismatch, match=r"step-000000000001 \(config\.json\) has"):
        Trainer(config(tmp_path, {}, train__steps=1, train__start_from=f'"{stored}"', **other)).run()


def test_how_it_is_trained_may_change(tmp_path: Path):
    Trainer(config(tmp_path, {}, train__steps=1)).run()
    others: dict[str, Any] = {"model__residual_dropout": 0.1, "model__initializer_range": 0.5, "optimizer__lr": 1e-3}
    assert Trainer(config(tmp_path, {}, train__steps=2, **others)).run().resumed_from == 1


def test_experts_do_not_mind_a_size_that_they_have_no_use_for(tmp_path: Path):
    """transformers writes one for every mixture of experts."""
    model = config(tmp_path, {}, sparse=True).model
    said = {**model.to_hf(), "intermediate_size": 999}
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    check_same_model(str(tmp_path), model)
    with pytest.raises(holdfast.Mismatch, match="num_experts_per_tok=1, not 2"):
        ModelIdentity(model).load_state_dict({**ModelIdentity(model).state_dict(), "num_experts_per_tok": 1})
