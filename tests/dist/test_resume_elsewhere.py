"""One run over five layouts: it follows the run of one rank that never stopped, step by step, dropout off and on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.train.config import RunConfig
from holdfast.train.loop import Trainer
from holdfast.train.metrics import read_metrics
from tests.dist.harness import run_ranks
from tests.dist.resume_cases import Routing, config, losses

pytestmark = pytest.mark.full  # five layouts in a chain

EACH, BATCH, LENGTH, LAYERS = 5, 8, 8, 8
CHAIN: list[tuple[str, int, dict[str, Any]]] = [
    ("fsdp-4", 4, {"dp_shard": 4}),
    ("tp-2-pp-2", 4, {"tp": 2, "pp": 2}),
    ("ep-4", 4, {"dp_shard": 4, "ep": 4}),
    ("one-rank", 1, {}),
    ("pp-4-interleaved", 4, {"pp": 4, "schedule": "interleaved", "stages_per_rank": 2}),
]
NEAR = 1e-5
Chosen = dict[tuple[int, int], np.ndarray]


def _settings(folder: Path, layout: dict[str, Any], steps: int, dropout: bool) -> RunConfig:
    return config(
        folder,
        layout,
        sparse=True,
        dropout=dropout,
        layers=LAYERS,
        train__steps=steps,
        train__micro_batch=1,
        optimizer__lr=1e-3,
        schedule__steps=EACH * len(CHAIN),
        checkpoint__every_steps=EACH,
        ema__decay=0.9,
    )


def _train(settings: RunConfig) -> dict[str, Any]:
    """Train to the end; what this rank's routers chose, and where the rank stands."""
    trainer = Trainer(settings)
    routing = Routing(trainer)
    outcome = trainer.run()
    meshes = trainer.replica.meshes
    return {
        "from": outcome.resumed_from,
        "derived": trainer.streams.derived,
        "dp": meshes.dp_rank,
        "tp": meshes.at("tp"),
        "tp_size": settings.layout.tp,
        "chosen": {name: [chosen.numpy() for chosen in each] for name, each in routing.chosen.items()},
    }


def _whole(ranks: list[dict[str, Any]], first: int) -> Chosen:
    """What was chosen at each step in each layer, by sample and token, of all ranks together."""
    out: Chosen = {}
    for rank in ranks:
        for name, each in rank["chosen"].items():
            layer = int(name.split(".")[2])
            per_step = len(each) // EACH
            width = LENGTH // rank["tp_size"]
            for number, chosen in enumerate(each):
                step, micro = first + number // per_step, number % per_step
                place = out.setdefault((step, layer), np.full((BATCH, LENGTH, 2), -1))
                columns = slice(rank["tp"] * width, (rank["tp"] + 1) * width)
                place[rank["dp"] * per_step + micro, columns] = chosen.reshape(width, 2)
    return out


def _apart(one: Path, other: Path) -> dict[str, float]:
    """The relative distance of every tensor of two checkpoints, in the L2 norm."""
    first, second = holdfast.open(one), holdfast.open(other)
    apart = {}
    for group, held in first.contents.groups.items():
        if group == "random":
            continue
        for key in held.tensors:
            a, b = (np.asarray(each.read(key, group), np.float64) for each in (first, second))
            apart[f"{group}: {key}"] = float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-30))
    return apart


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dropout", [False, True], ids=["dropout-off", "dropout-on"])
def test_five_layouts_follow_the_run_that_never_stopped(tmp_path: Path, dropout: bool):
    steps = EACH * len(CHAIN)
    whole = run_ranks(1, _train, _settings(tmp_path / "whole", {}, steps, dropout), deadline_s=240)
    expected = _reference(whole[0])
    for index, (name, world, layout) in enumerate(CHAIN):
        settings = _settings(tmp_path / "chain", layout, EACH * (index + 1), dropout)
        ranks = run_ranks(world, _train, settings, deadline_s=240)
        assert {rank["from"] for rank in ranks} == {EACH * index}
        assert all(bool(rank["derived"]) == (index > 0) for rank in ranks), name
        chosen = _whole(ranks, EACH * index + 1)
        assert len(chosen) == EACH * LAYERS
        for place, experts in chosen.items():
            assert np.array_equal(experts, expected[place]), f"{name}: other experts at (step, layer) {place}"
    one, other = losses(tmp_path / "whole"), losses(tmp_path / "chain")
    assert list(other) == list(range(1, steps + 1))
    assert other == pytest.approx(one, rel=NEAR)
    last = Path("checkpoints") / f"step-{steps:012d}"
    apart = _apart(tmp_path / "whole" / last, tmp_path / "chain" / last)
    assert {key.split(":")[0] for key in apart} == {"model", "optimizer", "ema/model"}
    far = {key: distance for key, distance in apart.items() if distance > NEAR}
    assert not far, f"{len(far)} of {len(apart)} tensors: {sorted(far.items(), key=lambda item: -item[1])[:5]}"
    _, events = read_metrics(tmp_path / "chain" / "metrics.jsonl")
    assert sum(event["event"] == "random streams derived anew" for event in events) == len(CHAIN) - 1


def _reference(rank: dict[str, Any]) -> Chosen:
    """The single rank's choices over all steps."""
    out: Chosen = {}
    for name, each in rank["chosen"].items():
        for number, chosen in enumerate(each):
            step, micro = 1 + number // BATCH, number % BATCH
            place = out.setdefault((step, int(name.split(".")[2])), np.full((BATCH, LENGTH, 2), -1))
            place[micro] = chosen.reshape(LENGTH, 2)
    return out
