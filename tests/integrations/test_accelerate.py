"""accelerate: killed and resumed runs equal the run that never stopped, to the last bit; refusals by name."""

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launcher import Launcher

RUNS = "tests.integrations.accelerate_runs"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
WORLDS = {"single": 1, "ddp": 2, "fsdp2": 2}


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(["torch", "tests.integrations.accelerate_runs"]) as made:
        yield made


def check_killed(launcher: Launcher, root: Path, mode: str, every: int, stops: list[int], **options: Any) -> None:
    """Kill a run after each of the steps in turn, resume it, and compare with one that never stopped."""
    world = WORLDS[mode]
    whole = launcher.values(world, f"{RUNS}:train_with", str(root / "whole"), mode, every, None, options)
    for stop in stops:
        killed = root / f"killed-{stop}"
        killed.mkdir()
        kill = killed / "kill"
        outcomes = launcher.run(world, f"{RUNS}:train_with", str(killed), mode, every, stop, options, kill_file=kill)
        assert [outcome.killed for outcome in outcomes] == [True] * world, [outcome.error for outcome in outcomes]
        resumed = launcher.values(world, f"{RUNS}:train_with", str(killed), mode, every, None, options)
        for rank in range(world):
            compare(whole[rank], resumed[rank], stop - stop % every)


def compare(whole: dict[Any, Any], resumed: dict[Any, Any], saved: int) -> None:
    steps = [step for step in whole if isinstance(step, int)]
    assert [step for step in resumed if isinstance(step, int)] == [step for step in steps if step > saved]
    assert {name: (whole.get(name), line) for name, line in resumed.items() if whole.get(name) != line} == {}


@pytest.mark.full
def test_two_fsdp2_ranks_killed_amid_the_second_epoch(launcher: Launcher, tmp_path: Path):
    check_killed(launcher, tmp_path, "fsdp2", 3, [7])  # 4 steps an epoch: saved at 6


@pytest.mark.full
@pytest.mark.parametrize("mode", WORLDS)
def test_killed_at_five_random_steps(launcher: Launcher, tmp_path: Path, mode: str):
    last = 24 if mode == "single" else 12
    check_killed(launcher, tmp_path, mode, 3, random.Random(mode).sample(range(3, last), 5))


@pytest.mark.full
@pytest.mark.parametrize("mode", WORLDS)
def test_killed_after_a_save_at_the_end_of_an_epoch(launcher: Launcher, tmp_path: Path, mode: str):
    check_killed(launcher, tmp_path, mode, 8 if mode == "single" else 4, [9])


@pytest.mark.full
def test_gradient_accumulation(launcher: Launcher, tmp_path: Path):
    check_killed(launcher, tmp_path, "single", 4, [10, 18], accumulation=2)


@pytest.mark.full
def test_persistent_workers(launcher: Launcher, tmp_path: Path):
    check_killed(launcher, tmp_path, "single", 4, [6, 9, 14], kept_workers=True)  # 8 is an epoch's end


@pytest.mark.full
@pytest.mark.parametrize("folders", [False, True])
def test_save_state_and_load_state(launcher: Launcher, tmp_path: Path, folders: bool):
    (whole,) = launcher.values(1, f"{RUNS}:train_attached", str(tmp_path / "whole"), folders)
    root = tmp_path / "killed"
    root.mkdir()
    (outcome,) = launcher.run(1, f"{RUNS}:train_attached", str(root), folders, 14, kill_file=root / "kill")
    assert outcome.killed, outcome.error
    (resumed,) = launcher.values(1, f"{RUNS}:train_attached", str(root), folders, None, True)
    compare(whole, resumed, 12)
    if not folders:  # total_limit=2
        assert len(list((root / "checkpoints").glob("step-*"))) == 2


@pytest.mark.full
def test_another_world_size_goes_on_after_the_samples_that_were_used(launcher: Launcher, tmp_path: Path):
    launcher.run(2, f"{RUNS}:train", str(tmp_path), "ddp", 3, 7, kill_file=tmp_path / "kill")
    (resumed,) = launcher.values(1, f"{RUNS}:train", str(tmp_path), "single", 100)
    (whole,) = launcher.values(1, f"{RUNS}:train", str(tmp_path / "whole"), "single", 100)
    steps = [line for step, line in resumed.items() if isinstance(step, int)]
    alone = [line for step, line in whole.items() if isinstance(step, int)]
    assert [line[2] for line in steps] == [line[2] for line in alone[12:]]  # 6 steps of 8 samples


@pytest.mark.full
def test_a_position_between_two_batches_is_refused_with_the_numbers(launcher: Launcher, tmp_path: Path):
    launcher.run(2, f"{RUNS}:train", str(tmp_path), "ddp", 3, 7, kill_file=tmp_path / "kill")
    (outcome,) = launcher.run(1, f"{RUNS}:train", str(tmp_path), "single", 100, None, 1, 5)
    assert "2 batches of 8 samples were used of epoch 1, 16 samples in all" in str(outcome.error)


@pytest.mark.full
def test_what_cannot_be_resumed_is_refused_by_name(launcher: Launcher, tmp_path: Path):
    (refusals,) = launcher.values(1, f"{RUNS}:refusals", str(tmp_path))
    wanted = {
        "not seedable": "InvalidArgument: data loader 0: shuffles by random numbers",
        "iterable": "Unsupported: data loader 1: its dataset is iterable",
        "not prepared": "InvalidArgument: DataLoader: not a loader that accelerator.prepare returned",
        "nothing prepared": "InvalidArgument: the accelerator has no model yet",
        "prepared late": "Mismatch: model_1: prepared or replaced after the restore",
        "position not used": "InvalidArgument: the restored random streams and data position were not used",
        "weights only": "Unsupported: save_state(safe_serialization=False)",
        "native folder": "Unsupported: ",
    }
    assert refusals.keys() == wanted.keys()
    for name, start in wanted.items():
        assert refusals[name].startswith(start), refusals[name]
