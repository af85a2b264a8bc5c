"""TRL's trainers with Holdfast: killed and resumed exactly, GRPO amid a generation included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.killed_runs import Killed, require_same_run
from tests.integrations.launcher import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.full]

RUNS = "tests.integrations.trl_runs"
SCENARIOS = {
    "SFT": Killed(RUNS, "run_sft", 1, ({"logging_steps": 3}, False), 5, 10),
    "SFT with LoRA": Killed(RUNS, "run_sft", 1, ({}, True), 5, 10),
    "SFT, DDP": Killed(RUNS, "run_sft", 2, ({"per_device_train_batch_size": 1}, False), 5, 10),
    "SFT, FSDP2": Killed(RUNS, "run_sft", 2, ({"per_device_train_batch_size": 1, "fsdp2": True}, False), 5, 10),
    "GRPO": Killed(RUNS, "run_grpo", 1, ({},), 4, 9),
    "GRPO, logs not aligned, adaptive entropy": Killed(
        RUNS, "run_grpo", 1, ({"logging_steps": 3, "save_steps": 2, "use_adaptive_entropy": True},), 4, 9
    ),
    "GRPO, DDP": Killed(RUNS, "run_grpo", 2, ({"per_device_train_batch_size": 2},), 4, 9),
}


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher([RUNS]) as made:
        yield made


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wholes")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_anywhere_and_resumed_is_the_same_run(
    launcher: Launcher, wholes: Path, tmp_path: Path, name: str, seed: int
):
    whole = SCENARIOS[name].run_whole(launcher, wholes / name)
    assert whole[0]["log"], "nothing was logged"
    require_same_run(whole, SCENARIOS[name].kill_and_resume(launcher, tmp_path, seed))
