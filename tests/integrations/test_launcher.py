"""The launcher itself: ranks, values, errors, kills."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.launcher import Launcher

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(["torch"]) as made:
        yield made


def rank_and_world(base: int) -> tuple[int, int]:
    return base + int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def fail_on_one() -> None:
    print("before the error")
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has had enough")


def wait_to_be_killed(file: str) -> None:
    if os.environ["RANK"] == "0":
        Path(file).touch()
    time.sleep(60)


def test_every_rank_returns_its_value(launcher: Launcher):
    assert launcher.values(2, rank_and_world, 10) == [(10, 2), (11, 2)]


def test_a_function_may_be_given_by_name(launcher: Launcher):
    assert launcher.values(1, f"{__name__}:rank_and_world", 10) == [(10, 1)]


def test_an_error_and_the_output_of_its_rank_are_reported(launcher: Launcher):
    first, second = launcher.run(2, fail_on_one)
    assert first.error is None
    assert "rank 1 has had enough" in str(second.error)
    assert "before the error" in second.output


def test_all_ranks_are_killed_once_the_file_exists(launcher: Launcher, tmp_path: Path):
    file = tmp_path / "now"
    outcomes = launcher.run(2, wait_to_be_killed, str(file), kill_file=file)
    assert [outcome.killed for outcome in outcomes] == [True, True]


def test_a_rank_past_the_deadline_fails_by_name(launcher: Launcher, tmp_path: Path):
    (outcome,) = launcher.run(1, wait_to_be_killed, str(tmp_path / "never"), deadline_s=0.5)
    assert outcome.error == "it did not end before the deadline"
