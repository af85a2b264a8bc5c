"""Kill -9 among the micro batches of an embedding model's step: the resumed run has the numbers of one that went on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.train.metrics import read_metrics
from tests.dist.embedding_cases import config, finish, train_until_killed, write_data
from tests.dist.harness import Victims, run_ranks
from tests.dist.resume_cases import losses

STEPS, SAVED, HELD_AT = 20, 9, 12
# The layout of the killed run, and another one to go on with.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one-rank": ({}, {"dp_shard": 2}),
    "fsdp-2": ({"dp_shard": 2}, {}),
    "ddp-2": ({"dp_replicate": 2}, {"tp": 2}),
    "zero1-2": ({"dp_replicate": 2, "zero1": True}, {"pp": 2}),
    "tp-2": ({"tp": 2}, {"dp_replicate": 2, "zero1": True}),
    "pp-2": ({"pp": 2}, {"dp_shard": 2}),
    "tp-2-fsdp-2": ({"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}),
}
SETS: dict[str, Any] = {"checkpoint__at_end": True, "train__evaluate_every": 20}
NEAR = 1e-5
DEADLINE_S = 240.0


def _world(layout: dict[str, Any]) -> int:
    sizes = (layout.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp", "pp"))
    return int(np.prod(list(sizes)))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_are_nine_a_kill_and_eleven(tmp_path: Path, name: str) -> None:
    data = write_data(tmp_path / "data")
    layout, other = CASES[name]
    whole, killed = (config(tmp_path / part, data, layout, **SETS) for part in ("whole", "killed"))
    expected = _finished(layout, whole)
    victims = Victims(_world(layout), train_until_killed, killed, HELD_AT)
    assert victims.hear(DEADLINE_S) == ["held"] * _world(layout)
    victims.kill()
    assert sorted(losses(tmp_path / "killed")) == list(range(1, HELD_AT))
    shutil.copytree(tmp_path / "killed", tmp_path / "elsewhere")
    resumed = _finished(layout, killed)
    _check_equal(expected, resumed)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    found = _finished(other, config(tmp_path / "elsewhere", data, other, **SETS))
    assert {start for start, _ in found} == {SAVED}
    _check_near(tmp_path / "whole", tmp_path / "elsewhere")


def _finished(layout: dict[str, Any], settings: Any) -> list[Any]:
    """Train to the end; one rank is this process."""
    world = _world(layout)
    return [finish(settings)] if world == 1 else run_ranks(world, finish, settings, deadline_s=DEADLINE_S)


def _check_equal(expected: list[Any], found: list[Any]) -> None:
    assert {start for start, _ in expected} == {0} and {start for start, _ in found} == {SAVED}
    for rank, ((_, wanted), (_, got)) in enumerate(zip(expected, found, strict=True)):
        assert not [key for key in wanted if wanted[key] != got.get(key)], f"rank {rank}"
        assert {key.split("/")[0] for key in got} >= {"model", "optimizer", "ema", "loss", "random", "position"}


def _check_near(one: Path, other: Path) -> None:
    """The losses of all steps, the measures and every tensor of the last checkpoint."""
    assert losses(other) == pytest.approx(losses(one), rel=NEAR)
    assert sorted(losses(one)) == list(range(1, STEPS + 1))
    for alone, together in zip(_evaluations(one), _evaluations(other), strict=True):
        assert {"lists/ndcg@10", "ema_lists/mrr@10", "graded/spearman"} <= alone.keys()
        assert together == pytest.approx(alone, rel=NEAR)
    last = Path("checkpoints") / f"step-{STEPS:012d}"
    first, second = holdfast.open(one / last), holdfast.open(other / last)
    groups = first.contents.groups
    assert {"model", "optimizer", "loss", "ema/model"} <= groups.keys()
    for group in groups.keys() - {"random"}:
        for key in groups[group].tensors:
            a, b = (np.asarray(each.read(key, group), np.float64) for each in (first, second))
            assert np.linalg.norm(a - b) <= NEAR * max(np.linalg.norm(a), 1e-30), f"{group}: {key}"


def _evaluations(folder: Path) -> list[dict[str, float]]:
    _, events = read_metrics(folder / "metrics.jsonl")
    measured = [event for event in events if event["event"] == "evaluated"]
    return [{name: event[name] for name in event if "/" in name} for event in measured]
