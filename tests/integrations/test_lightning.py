"""Lightning: killed and resumed runs equal the run that never stopped, to the last bit; refusals by name."""

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.launcher import Launcher

RUNS = "tests.integrations.lightning_runs"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
WORLDS = {"single": 1, "ddp": 2, "fsdp2": 2}
TORCHRUN = {  # what torchrun sets beside RANK and the like
    "TORCHELASTIC_RUN_ID": "test",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(["torch", "tests.integrations.lightning_runs"]) as made:
        yield made


def check_killed(
    launcher: Launcher, root: Path, mode: str, stops: list[int], trainer: dict[str, Any] | None = None, **options: Any
) -> None:
    """Kill a run before each of the batches in turn, resume it, and compare with one that never stopped."""
    world, given = WORLDS[mode], (trainer or {}, options)
    environment = TORCHRUN if world > 1 else {}
    whole = launcher.values(world, f"{RUNS}:train", str(root / "whole"), mode, None, *given, environment=environment)
    for stop in stops:
        killed = root / f"killed-{stop}"
        killed.mkdir()
        outcomes = launcher.run(
            world, f"{RUNS}:train", str(killed), mode, stop, *given, environment=environment, kill_file=killed / "kill"
        )
        assert [outcome.killed for outcome in outcomes] == [True] * world, [outcome.error for outcome in outcomes]
        resumed = launcher.values(world, f"{RUNS}:train", str(killed), mode, None, *given, environment=environment)
        for rank in range(world):
            compare(whole[rank], resumed[rank], stop)


def compare(whole: dict[Any, Any], resumed: dict[Any, Any], stop: int) -> None:
    batches = [batch for batch in whole if isinstance(batch, int)]
    first = min(batch for batch in resumed if isinstance(batch, int))
    assert 0 < first <= stop
    logged = [name for name in whole if " at " in str(name) and int(str(name).split()[-1]) >= first]
    assert set(resumed) == {*(batch for batch in batches if batch >= first), *logged, "best"}
    assert {name: (whole.get(name), line) for name, line in resumed.items() if whole.get(name) != line} == {}


def test_killed_amid_the_second_epoch(launcher: Launcher, tmp_path: Path):
    options = {"every_n_train_steps": 4, "monitor": "val_loss", "save_top_k": 2}
    check_killed(launcher, tmp_path, "single", [13], {"val_check_interval": 4}, **options)  # 8 batches an epoch


@pytest.mark.full
@pytest.mark.parametrize("mode", WORLDS)
def test_killed_at_five_random_batches(launcher: Launcher, tmp_path: Path, mode: str):
    last = 24 if mode == "single" else 12
    check_killed(launcher, tmp_path, mode, random.Random(mode).sample(range(3, last), 5), every_n_train_steps=3)


@pytest.mark.full
@pytest.mark.parametrize("mode", WORLDS)
def test_killed_after_a_save_at_the_end_of_an_epoch(launcher: Launcher, tmp_path: Path, mode: str):
    check_killed(launcher, tmp_path, mode, [9], every_n_epochs=1, monitor="val_loss")


@pytest.mark.full
@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ({"plateau": "epoch"}, {"every_n_epochs": 1}),
        ({"plateau": "step", "val_check_interval": 4}, {"every_n_train_steps": 4}),
        ({"max_steps": 21}, {"every_n_train_steps": 4}),
        ({"max_steps": 21}, {"every_n_epochs": 1}),
        ({"accumulate_grad_batches": 2}, {"every_n_train_steps": 2}),
        ({"limit_train_batches": 5, "limit_val_batches": 0}, {"every_n_train_steps": 3}),
        ({"workers": 2}, {"every_n_train_steps": 3, "replay": True}),
        ({"loader": "kept"}, {"every_n_train_steps": 4}),
        ({"val": "kept", "num_sanity_val_steps": 0}, {"every_n_train_steps": 4}),
        ({"val": "kept"}, {"every_n_train_steps": 4}),
        ({"val": "kept", "num_sanity_val_steps": 0}, {"every_n_epochs": 1}),
        ({"val": "generator", "limit_val_batches": 1}, {"every_n_train_steps": 3}),
        ({"val": "generator", "limit_val_batches": 1}, {"every_n_epochs": 1}),
        ({"loader": "shared", "val": "shared", "limit_val_batches": 1}, {"every_n_train_steps": 3}),
        ({"loader": "stateful"}, {"every_n_train_steps": 3}),
        ({"loader": "generator"}, {"every_n_train_steps": 3}),
        ({"loader": "weighted"}, {"every_n_train_steps": 3}),
        ({"module": "gan"}, {"every_n_train_steps": 6}),
    ],
    ids=lambda given: " ".join(f"{name}={value}" for name, value in given.items()),
)
def test_settings_of_trainer_and_data(launcher: Launcher, tmp_path: Path, trainer: dict, options: dict):
    check_killed(launcher, tmp_path, "single", [14, 18], trainer, **options)


@pytest.mark.full
def test_another_world_size_amid_an_epoch_is_refused_with_the_numbers(launcher: Launcher, tmp_path: Path):
    options = {"every_n_train_steps": 3}
    given = ({}, options)
    kill = tmp_path / "kill"
    launcher.run(2, f"{RUNS}:train", str(tmp_path), "ddp", 7, *given, environment=TORCHRUN, kill_file=kill)
    (outcome,) = launcher.run(1, f"{RUNS}:train", str(tmp_path), "single", None, *given)
    assert "after 2 batches of 8 on all ranks; now it has 29 samples and batches of 4" in str(outcome.error)
    (lines,) = launcher.values(1, f"{RUNS}:train", str(tmp_path), "single", None, {"batch": 8}, options)
    assert min(batch for batch in lines if isinstance(batch, int)) == 6  # 8 samples on one rank go on


@pytest.mark.full
def test_the_best_and_the_last_are_loaded_for_test_and_fit(launcher: Launcher, tmp_path: Path):
    (found,) = launcher.values(1, f"{RUNS}:evaluate", str(tmp_path))
    assert found["tested"] == found["best"]
    assert found["tested last"] == found["last"]
    assert found["refit"] == found["best step"] + 1


@pytest.mark.full
def test_what_cannot_be_resumed_is_refused_by_name(launcher: Launcher, tmp_path: Path):
    (refusals,) = launcher.values(1, f"{RUNS}:refusals", str(tmp_path))
    wanted = {
        "two": "RuntimeError: Found more than one stateful callback of type `HoldfastCheckpoint`",
        "fsdp1": "Unsupported: the strategy FSDPStrategy is not supported: FSDP1",
        "exception": "Unsupported: save_on_exception",
        "hook": 'Unsupported: checkpoint["state_dict"] is used by a hook',
        "iterable": "Unsupported: the training data",
        "outside": "InvalidArgument: model=: ",
    }
    assert refusals.keys() == wanted.keys()
    for name, start in wanted.items():
        assert refusals[name].startswith(start), refusals[name]


@pytest.mark.full
def test_pytorch_lightning(launcher: Launcher, tmp_path: Path):
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    first, second = launcher.values(1, f"{RUNS}:other_package", str(tmp_path))[0]
    assert (first, second) == ([0, 1, 2], [3, 4])
