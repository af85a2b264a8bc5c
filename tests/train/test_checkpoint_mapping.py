"""Through the mapping of experts: what is stored has the hub's keys, and tied weights have one state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.train.checkpoint_mapping import load_mapping, save_mapping
from holdfast.train.layout import Layout
from holdfast.train.parallel.model_replica import ModelReplica
from holdfast.train.parallel.parallel_model import build
from tests.dist.train_cases import batches, model


def stepped(seed: int, tied: bool) -> ModelReplica:
    replica = build(model("qwen2_moe", tie_word_embeddings=tied), Layout(), seed=seed)
    optimizer = replica.make_optimizer(lr=0.01)
    replica.forward_backward(batches(1, seed=seed))
    optimizer.step()
    return replica


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_state_comes_back_through_the_mapping(tmp_path: Path, tied: bool) -> None:
    source, target = stepped(1, tied), stepped(2, tied)
    saved = holdfast.save(tmp_path / "saved", source.state(), mapping=source.mapping)
    heads = [key for key in saved.keys("optimizer") if key.startswith("lm_head")]
    assert bool(heads) is not tied
    assert "model.layers.0.mlp.experts.7.down_proj.weight/exp_avg" in saved.keys("optimizer")
    holdfast.load(tmp_path / "saved", target.state(), mapping=target.load_mapping)
    for (key, one), other in zip(source.parameters().items(), target.parameters().values(), strict=True):
        assert torch.equal(one, other), key
        for name, value in source.optimizer.state[one].items():
            assert torch.equal(value, target.optimizer.state[other][name]), f"{key}/{name}"


def test_models_without_experts_need_no_mapping() -> None:
    assert save_mapping(model("llama")) is None and load_mapping(model("llama")) is None


def test_a_checkpointer_turns_the_mapping_round_by_itself(tmp_path: Path) -> None:
    source, target = stepped(1, True), stepped(2, True)
    for replica, restores in ((source, None), (target, 1)):
        with holdfast.Checkpointer(tmp_path / "run", mapping=replica.mapping) as checkpointer:
            assert checkpointer.restore(replica.state()) == restores
            if restores is None:
                checkpointer.save(1, replica.state()).result(60)
    for (key, one), other in zip(source.parameters().items(), target.parameters().values(), strict=True):
        assert torch.equal(one, other), key
