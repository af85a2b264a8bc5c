"""Kill -9 and resume on the same layout: every number is the one it would have been, with dropout and noise on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.train.config import RunConfig
from tests.dist.harness import Victims, run_ranks, tell_parent
from tests.dist.resume_cases import config, finish, finish_then_train, losses

pytestmark = pytest.mark.sliced(9)

STEPS, SAVED, HELD_AT = 20, 9, 12
LAYOUTS: dict[str, tuple[dict[str, Any], bool]] = {
    "one-rank": ({}, False),
    "fsdp-4": ({"dp_shard": 4}, False),
    "tp-2-dp-2": ({"tp": 2, "dp_shard": 2}, False),
    "ep-2-dp-2": ({"dp_shard": 2, "ep": 2}, True),
    "zero1-2": ({"dp_replicate": 2, "zero1": True}, False),
}
PIPELINES: dict[str, tuple[dict[str, Any], bool]] = {
    "pp-2-dp-2": ({"pp": 2, "dp_shard": 2}, False),
    "pp-2-tp-2": ({"pp": 2, "tp": 2}, True),
}
DEADLINE_S = 240.0


def _run(folder: Path, layout: dict[str, Any], sparse: bool, accumulation: int) -> RunConfig:
    return config(
        folder,
        layout,
        sparse=sparse,
        dropout=True,
        train__steps=STEPS,
        train__accumulation=accumulation,
        checkpoint__every_steps=SAVED,
        checkpoint__at_end=False,
        ema__decay=0.9,
    )


def _check(whole: Path, resumed: Path, expected: list[Any], found: list[Any]) -> None:
    assert [start for start, _ in expected] == [0] * len(expected)
    assert [start for start, _ in found] == [SAVED] * len(found)
    for rank, ((_, wanted), (_, got)) in enumerate(zip(expected, found, strict=True)):
        differing = [key for key in wanted if wanted[key] != got.get(key)]
        assert not differing, f"rank {rank}: {differing[:5]} and {len(differing)} of {len(wanted)} in all"
    assert any(key.startswith("ema/") for key in found[0][1])
    assert any("exp_avg" in key for _, got in found for key in got)
    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == STEPS


def _killed(victims: Victims, waits: int) -> list[list[Any]]:
    """What the victims said before they were killed in the middle of their second run."""
    said = [victims.hear(DEADLINE_S) for _ in range(waits)]
    victims.kill()
    return said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_twenty_steps_are_nine_a_kill_and_eleven(tmp_path: Path, name: str):
    """Without accumulation and with it. Ranks finish one run, then are killed in the next."""
    layout, sparse = LAYOUTS[name]
    world = max(1, layout.get("dp_shard", 1) * layout.get("dp_replicate", 1) * layout.get("tp", 1))
    plain = [_run(tmp_path / part, layout, sparse, 1) for part in ("whole", "killed")]
    gathered = [_run(tmp_path / f"{part}-2", layout, sparse, 2) for part in ("whole", "killed")]
    expected, _ = _killed(Victims(world, finish_then_train, *plain, HELD_AT), 2)
    victims = Victims(world, _resume_then_next, plain[1], *gathered)
    resumed, expected_2, _ = _killed(victims, 3)
    resumed_2 = run_ranks(world, finish, gathered[1], deadline_s=DEADLINE_S)
    _check(tmp_path / "whole", tmp_path / "killed", expected, resumed)
    _check(tmp_path / "whole-2", tmp_path / "killed-2", expected_2, resumed_2)


def _resume_then_next(resumed: RunConfig, whole: RunConfig, doomed: RunConfig) -> None:
    tell_parent(finish(resumed))
    finish_then_train(whole, doomed, HELD_AT)


@pytest.mark.timeout(600)
@pytest.mark.full
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_too_whose_micro_batches_are_their_accumulation(tmp_path: Path, name: str):
    layout, sparse = PIPELINES[name]
    whole, killed = (_run(tmp_path / part, layout, sparse, 4) for part in ("whole", "killed"))
    expected, _ = _killed(Victims(4, finish_then_train, whole, killed, HELD_AT), 2)
    resumed = run_ranks(4, finish, killed, deadline_s=DEADLINE_S)
    _check(tmp_path / "whole", tmp_path / "killed", expected, resumed)
