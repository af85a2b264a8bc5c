"""Options and callbacks that reach Holdfast through Trainer's methods, in a run that is interrupted and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.killed_runs import ENVIRONMENT, call
from tests.integrations.launcher import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.full]

RUNS, CASES = "tests.integrations.trainer_runs", "tests.integrations.trainer_options_cases"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher([RUNS]) as made:
        yield made


def one(launcher: Launcher, name: str, *arguments: Any) -> Any:
    return launcher.values(1, call, CASES, name, *arguments, environment=ENVIRONMENT)[0]


@pytest.mark.parametrize("name", ["interrupted_object", "evaluate_at_start"])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(launcher: Launcher, tmp_path: Path, name: str):
    found = one(launcher, name, str(tmp_path / "run"))
    whole, again = found["whole"], found["again"]
    assert again["log"] == whole["log"]
    assert again["weights"] == whole["weights"]
    assert again["step"] == 14


def test_a_callback_may_save_where_the_arguments_ask_for_no_saves(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "saves_of_a_callback", str(tmp_path / "run"))
    assert found["first"] == ["step-000000000003", "step-000000000005"]
    assert "holds step 5 of an earlier run, and a save of a callback" in found["second"]


def test_trainers_own_save_at_sigterm_is_a_step_to_go_on_from(launcher: Launcher, tmp_path: Path):
    found = one(launcher, "terminated", str(tmp_path / "run"))
    assert found["saved"][0] == "step-000000000005"
    assert found["again"]["log"] == found["whole"]["log"]
    assert found["again"]["weights"] == found["whole"]["weights"]
