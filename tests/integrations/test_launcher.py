"""The launcher itself: ranks, values, errors, kills."""

import errno
import os
import socket
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


def bind_and_meet() -> tuple[int | None, int]:
    """Try to take the port as another process might, then meet the other rank there; the errno, and the sum."""
    import torch
    import torch.distributed as dist

    refused = None
    try:
        with socket.socket() as other:
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            other.listen()
    except OSError as error:
        refused = error.errno
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    return refused, int(total)


def fail_beside_a_rank_that_waits() -> None:
    if os.environ["RANK"] == "0":
        raise ValueError("rank 0 has had enough")
    time.sleep(300)


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


def test_nobody_else_can_take_the_port_of_a_scenario(launcher: Launcher):
    assert launcher.values(2, bind_and_meet) == [(errno.EADDRINUSE, 3)] * 2


def test_ranks_that_wait_for_a_failed_one_are_ended(launcher: Launcher, monkeypatch: pytest.MonkeyPatch):
    first, second = launcher.run(2, fail_beside_a_rank_that_waits, peers_s=0.5)
    assert "rank 0 has had enough" in str(first.error)
    assert second.error == "it did not end before the deadline, or soon after another rank failed"


def test_all_ranks_are_killed_once_the_file_exists(launcher: Launcher, tmp_path: Path):
    file = tmp_path / "now"
    outcomes = launcher.run(2, wait_to_be_killed, str(file), kill_file=file)
    assert [outcome.killed for outcome in outcomes] == [True, True]


def test_a_rank_past_the_deadline_fails_by_name(launcher: Launcher, tmp_path: Path):
    (outcome,) = launcher.run(1, wait_to_be_killed, str(tmp_path / "never"), deadline_s=0.5)
    assert outcome.error == "it did not end before the deadline, or soon after another rank failed"
