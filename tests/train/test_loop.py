"""The loop on one rank: what it leaves behind, where it goes on, and what evaluation counts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.train.config import read_config
from holdfast.train.loop import Progress, Trainer
from holdfast.train.metrics import read_metrics
from tests.dist.resume_cases import config


def test_what_a_run_leaves_behind(tmp_path: Path):
    settings = config(tmp_path, {}, train__steps=4, checkpoint__every_steps=3, train__evaluate_every=2, ema__decay=0.5)
    seen: list[Progress] = []
    outcome = Trainer(settings).run(seen.append)
    assert (outcome.step, outcome.resumed_from, outcome.preempted) == (4, 0, False)
    assert [progress.step for progress in seen] == [1, 2, 3, 4]
    assert read_config(tmp_path / "config.toml") == settings
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    steps, events = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["consumed_samples"] for record in steps] == [8, 16, 24, 32]
    assert {"loss", "lr", "gradient_norm", "tokens_per_s"} <= steps[0].keys()
    assert [event["step"] for event in events if event["event"] == "save"] == [3, 4]
    assert all(event["stall_ms"] >= 0 for event in events if event["event"] == "save")
    assert [(event["step"], event["tokens"]) for event in events if event["event"] == "evaluated"] == [(2, 24), (4, 24)]
    saved = holdfast.open(tmp_path / "checkpoints" / "step-000000000004")
    assert saved.verify().good
    assert {"model", "optimizer", "ema/model"} <= set(saved.contents.groups)


def test_a_finished_run_has_nothing_to_do_and_a_longer_one_goes_on(tmp_path: Path):
    Trainer(config(tmp_path, {}, train__steps=3)).run()
    again = Trainer(config(tmp_path, {}, train__steps=3))
    assert again.run().resumed_from == 3
    longer = Trainer(config(tmp_path, {}, train__steps=5))
    outcome = longer.run()
    assert (outcome.resumed_from, outcome.step) == (3, 5)
    assert longer.position.consumed_samples == 40


def test_other_data_is_not_taken_for_the_same(tmp_path: Path):
    Trainer(config(tmp_path, {}, train__steps=2)).run()
    with pytest.raises(holdfast.Mismatch, match="seed"):
        Trainer(config(tmp_path, {}, train__steps=3, data__seed=5)).run()


def test_a_signal_saves_and_ends_the_run(tmp_path: Path):
    def stop(progress: Progress) -> None:
        if progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = Trainer(config(tmp_path, {}, train__steps=50, checkpoint__every_steps=0)).run(stop)
    assert outcome.preempted
    assert outcome.step == 3
    assert Trainer(config(tmp_path, {}, train__steps=4)).run().resumed_from == 3


def test_evaluation_changes_nothing(tmp_path: Path):
    runs = {}
    for every in (0, 1):
        settings = config(tmp_path / str(every), {}, dropout=True, train__steps=4, train__evaluate_every=every)
        runs[every] = [progress.loss for progress in _seen(Trainer(settings))]
    assert runs[0] == runs[1]


def _seen(trainer: Trainer) -> list[Progress]:
    seen: list[Progress] = []
    trainer.run(seen.append)
    return seen


def test_learning_and_clipping(tmp_path: Path):
    """The rate follows the schedule, not what was restored, and the norm that is told is the one before clipping."""
    trainer = Trainer(config(tmp_path, {}, train__steps=10, optimizer__clip=1e-3))
    progress = trainer.step(1)
    trainer.metrics.close()
    assert progress.gradient_norm > 1e-3
    total = torch.cat([p.grad.flatten() for p in trainer.replica.module.parameters()]).norm()
    assert float(total) == pytest.approx(1e-3, rel=1e-3)
    assert progress.lr == pytest.approx(1e-2 / 3)
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {progress.lr}
    assert json.dumps(trainer.position.state_dict())


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_begins_with_the_weights_of_another(tmp_path: Path, tied: bool):
    """Of the run itself, when there is a checkpoint of it; experts come from their own keys, bf16 is cast."""
    options = {"sparse": True, "model__tie_word_embeddings": tied}
    first = Trainer(config(tmp_path / "a", {}, train__steps=2, checkpoint__model_dtype="bfloat16", **options))
    first.run()
    stored = tmp_path / "a" / "checkpoints" / "step-000000000002"
    second = Trainer(config(tmp_path / "b", {}, train__steps=1, train__start_from=str(stored), **options))
    second._load_weights(str(stored))
    for one, other in zip(first.replica.module.parameters(), second.replica.module.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-2, atol=1e-4)
        assert other.dtype == torch.float32
    second.run()
    _, events = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert [event["event"] for event in events].count("took weights") == 2
    third = Trainer(config(tmp_path / "b", {}, train__steps=2, train__start_from=str(stored), **options))
    assert third.run().resumed_from == 1
    _, events = read_metrics(tmp_path / "b" / "metrics.jsonl")
    assert [event["event"] for event in events].count("took weights") == 2
