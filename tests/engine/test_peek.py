"""`peek` is what `restore` would take, before any model exists; `committed` tells of finished saves."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from tests.dist.harness import run_ranks


class Mode(Enum):
    TRAIN = "train"


@dataclass
class Counters:
    epoch: int
    mode: Mode = Mode.TRAIN


def state_of(step: int) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "step": step,
        "counters": Counters(step // 2),
        "tree": [1, torch.ones(2)],
    }


def saved(root: Path, *steps: int) -> None:
    with holdfast.Checkpointer(root) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), metrics={"loss": step / 8}).result()


def test_there_is_nothing_to_see_and_no_folder_is_made(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with holdfast.Checkpointer(root) as checkpointer:
        assert checkpointer.peek() is None
    assert not root.exists()


def test_a_peek_has_the_values_of_the_newest_step_and_restore_takes_it(tmp_path: Path) -> None:
    saved(tmp_path, 3, 5)
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        peek = checkpointer.peek()
        assert peek is not None and (peek.step, dict(peek.metrics)) == (5, {"loss": 0.625})
        assert peek.path.endswith("step-000000000005")
        assert dict(peek.values) == {
            "step": 5,
            "counters": {"epoch": 2, "mode": "train"},
            "tree": [1, {"$tensor": "1"}],
        }
        assert checkpointer.restore(state_of(0)) == 5
        checkpointer.save(6, state_of(6))
        again = checkpointer.peek()
        assert again is not None and again.step == 6, "a peek waits for the save in flight, as restore does"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("file", "seen"), [("state.json", 3), ("model-00001-of-00001.safetensors", 5)])
def test_damage_is_passed_over_as_far_as_it_is_looked_for(tmp_path: Path, file: str, seen: int) -> None:
    saved(tmp_path, 3, 5)
    damage(tmp_path / "step-000000000005" / file)
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        quick, whole = checkpointer.peek(), checkpointer.peek(verify=True)
        assert quick is not None and quick.step == seen
        assert whole is not None and whole.step == 3
        with pytest.warns(holdfast.HoldfastWarning, match="restored step 3, and skipped damaged"):
            assert checkpointer.restore(state_of(0)) == 3


def test_if_nothing_is_good_a_peek_raises_as_a_restore_does(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    damage(tmp_path / "step-000000000003" / "state.json")
    with (
        holdfast.Checkpointer(tmp_path) as checkpointer,
        pytest.raises(holdfast.Damaged, match="no checkpoint is good"),
    ):
        checkpointer.peek()


class Position:
    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"at": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["at"]


def _save_ranks(root: str) -> None:
    with holdfast.Checkpointer(root) as checkpointer:
        checkpointer.save(4, {"step": 4, "loader": Position(10 + dist.get_rank())}).result()


def _peek_ranks(root: str) -> Any:
    with holdfast.Checkpointer(root) as checkpointer:
        peek = checkpointer.peek()
        return peek and (peek.step, dict(peek.values))


def test_each_rank_sees_its_own_values(tmp_path: Path) -> None:
    run_ranks(2, _save_ranks, str(tmp_path))
    assert run_ranks(2, _peek_ranks, str(tmp_path)) == [
        (4, {"step": 4, "loader": {"at": 10 + rank}}) for rank in (0, 1)
    ]
    assert run_ranks(3, _peek_ranks, str(tmp_path)) == [(4, {"step": 4})] * 3, "saved for other coordinates"


def test_committed_saves_are_told_once_and_in_order(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, on_busy="skip") as checkpointer:
        assert checkpointer.committed() == []
        first = checkpointer.save(1, state_of(1))
        first.result()
        assert checkpointer._engine.background is not None
        writer = checkpointer._engine.background.writer.pid
        os.kill(writer, signal.SIGSTOP)
        try:
            second, skipped = checkpointer.save(2, state_of(2)), checkpointer.save(3, state_of(3))
            assert skipped.skipped and checkpointer.committed() == [first]
        finally:
            os.kill(writer, signal.SIGCONT)
        second.result()
        assert checkpointer.committed() == [second] and checkpointer.committed() == []


def test_a_failed_save_is_not_among_the_committed_ones(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        (tmp_path / "step-000000000001").mkdir(parents=True)
        (tmp_path / "step-000000000001" / "thesis.txt").write_text("years of work")
        handle = checkpointer.save(1, {"step": 1})
        handle.wait(60)
        assert handle.error is not None
        with pytest.warns(holdfast.HoldfastWarning, match="was not saved"):
            other = checkpointer.save(2, {"step": 2})
        other.result()
        assert [found.step for found in checkpointer.committed()] == [2]
